"""`python -m gateway --router host:port --model FOLDER ...`"""

import sys

import epserve_start.check  # noqa: F401 - before a foreign package is imported as ours
import core.first_process  # noqa: F401 - before all that takes its time
import core.fork_safety  # noqa: F401 - before whatever imports gRPC
from core.log import configure
from gateway.base.settings import GatewaySettings
from gateway.server import make_certificate, make_keys, run
from gateway.workers import run_workers


def main() -> int:
    """Exit status 0 after a stop by signal, 1 when the process could not start, 2 for wrong
    flags."""
    settings = GatewaySettings.parse(sys.argv[1:])
    configure("gateway", settings.name or "gateway", settings.log_level, settings.log_format)
    try:
        make_keys(settings)
        make_certificate(settings)
        if settings.workers > 1:
            return run_workers(settings)
        run(settings)
    except (OSError, ValueError) as error:  # the address, the model folder, keys
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
