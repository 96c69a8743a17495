"""To be imported before gRPC by a process that starts others under uvloop.

uvloop forks, and gRPC's handlers around a fork may crash the child before it becomes the other
program (seen with grpcio 1.85: 2 in 100 under load). Nothing here forks without executing another
program at once, so the handlers are of no use. gRPC looks at the variable when it is imported.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
