"""To be imported before all other packages of ours by a process that starts.

It says on stderr what foreign packages it finds under our names, and ends the process, exit status
1, where Python would import one of them in place of ours.
"""

import sys

from epserve_start.clashes import clashes

_found = [*clashes()]
sys.stderr.writelines(f"epserve: {clash.sentence}\n" for clash in _found)
if any(clash.stops for clash in _found):
    sys.exit(1)
