"""`python -m gateway.worker PARENT_PID`: one of several processes; its settings come on stdin."""

import json
import sys

import core.fork_safety  # noqa: F401 - before whatever imports gRPC
from core.log import configure
from core.process import die_with_parent
from gateway.base.settings import GatewaySettings
from gateway.server import run

# Exit status of a worker that cannot start, now or later; an unexpected exception ends it with 1.
CANNOT_START = 3


def main() -> int:
    """Exit status 0 after a stop by signal."""
    die_with_parent(int(sys.argv[1]))
    settings = GatewaySettings(**json.load(sys.stdin))
    configure("gateway", settings.name, settings.log_level, settings.log_format)
    try:
        run(settings, patient=True)
    except (OSError, ValueError) as error:  # the address, the model folder
        sys.stderr.write(f"error: {error}\n")
        return CANNOT_START
    return 0


if __name__ == "__main__":
    sys.exit(main())
