"""`python -m router`: see `router.settings` for the flags."""

import asyncio
import sys

import epserve_start.check  # noqa: F401 - before a foreign package is imported as ours
import core.first_process  # noqa: F401 - before all that takes its time
from core import tracing
from core.log import configure
from router.process import run_router
from router.settings import RouterSettings
from rpc import cluster_credentials


def main() -> int:
    settings = RouterSettings.parse(sys.argv[1:])
    configure("router", settings.name or "router", settings.log_level, settings.log_format)
    try:
        cluster_credentials.use(settings)
        tracing.configure(
            "router", settings.name, settings.otlp_endpoint, settings.trace_sample_ratio
        )
        asyncio.run(run_router(settings))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    finally:
        tracing.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
