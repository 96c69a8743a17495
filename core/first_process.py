"""To be imported first by a process that may be a container's first.

The kernel drops signals that the first process of a PID namespace has no handler for: one that is
stopped while it still imports would start, serve, and be killed when the patience is over.
"""

import os
import signal
import sys

if os.getpid() == 1:
    # Until the process has its own.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
