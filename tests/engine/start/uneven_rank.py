"""A decode rank that takes its time to load, or dies at it: `python uneven_rank.py HOW SECONDS`.

HOW is slow or dies: what rank 1 of the group does when it comes to its weights, or, where it dies,
rank 0 is slow meanwhile.
"""

import os
import sys
import time
from typing import Any

from decode_worker.loop import DecodeLoop
from engine.start import rank_model
from engine.start.rank import run_rank

how, seconds = sys.argv[1], float(sys.argv[2])
load_model = rank_model.load_model


def load(*arguments: Any, rank: int, **options: Any) -> Any:  # noqa: ANN401
    if rank == 1 and how == "dies":
        os._exit(9)
    if rank == (1 if how == "slow" else 0):
        time.sleep(seconds)
    return load_model(*arguments, rank=rank, **options)


rank_model.load_model = load
run_rank(lambda context: DecodeLoop(context).run())
