"""Processes of one gateway show the one that keeps them that their event loops turn: each touches
a file in the folder that they share."""

import asyncio
import os
from pathlib import Path

BEAT_SECONDS = 1.0
# So many beats that do not come: the process is frozen, or stuck. Whoever it serves waits in vain.
NUM_MISSED = 10


async def beat(folder: Path) -> None:
    """Until cancelled."""
    file = _file_of(folder, os.getpid())
    file.touch()
    try:
        while True:
            os.utime(file)  # also where the disk is full
            await asyncio.sleep(BEAT_SECONDS)
    finally:
        file.unlink(missing_ok=True)


async def until_stuck(folder: Path, pid: int) -> None:
    """Returns when the beats of a process have stopped; while it starts there are none."""
    file = _file_of(folder, pid)
    last, num_missed = 0, 0
    while num_missed < NUM_MISSED:
        await asyncio.sleep(BEAT_SECONDS)
        latest = file.stat().st_mtime_ns if file.exists() else 0
        num_missed = num_missed + 1 if 0 < last == latest else 0
        last = latest


def _file_of(folder: Path, pid: int) -> Path:
    return folder / f"beat-{pid}"
