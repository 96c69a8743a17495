"""Processes of ours: where they find packages, and how they ended."""

import os
import signal
from pathlib import Path

# Flat packages: the folder that holds ctl/ holds all of them.
PACKAGES = Path(__file__).parents[2]


def package_environment() -> dict[str, str]:
    """Ours, in which packages are found whatever the working folder is, and a folder `model` or
    `core` in the working folder never takes their place."""
    paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"
