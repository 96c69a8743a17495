"""`python -m router`: see `router.settings` for the flags."""

import asyncio
import sys

from core.log import configure
from router.discovery import DiscoveryError
from router.process import run_router
from router.settings import RouterSettings


def main() -> int:
    settings = RouterSettings.parse(sys.argv[1:])
    configure("router", settings.name or "router", settings.log_level, settings.log_format)
    try:
        asyncio.run(run_router(settings))
    except (OSError, DiscoveryError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
