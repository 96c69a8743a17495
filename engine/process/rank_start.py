"""What a front tells a rank process at its start, in one environment variable.

Everything else travels over the link. The front spawns `python -m {role}_worker.rank`.
"""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

VARIABLE = "EPSERVE_RANK_START"
# For torch's large tensors on the host: weights are read into new memory, and to map that page by
# page takes longer than to copy what is in the page cache.
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank process begins.

    role          "prefill" or "decode"
    epoch         of the worker (its front); part of every name that peers see
    local_rank    index within the worker: device offset, `RankBatch.rank`, `Ready.rank`
    rank, size    within the EP group, which may span several workers
    rendezvous    host:port where the EP group meets; rank 0 listens there
    group_secret  that ranks of the EP group know each other by
    endpoint      zmq endpoint that the front has bound; the rank connects
    front_pid     for `core.process.die_with_parent`
    settings      `WorkerSettings` as JSON-able values
    """

    role: str
    epoch: str
    local_rank: int
    rank: int
    size: int
    rendezvous: str
    group_secret: str
    endpoint: str
    front_pid: int
    settings: dict[str, Any]

    def to_environment(self) -> dict[str, str]:
        """Variables to add to the rank's environment."""
        return {
            # Idle OpenMP threads spin by default. Where several processes share the cores, that
            # makes a forward pass up to a hundred times slower.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            **HUGE_PAGES,
            VARIABLE: msgspec.json.encode(self).decode(),
        }

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> "RankStart":
        """Raises ValueError when the variable is missing or malformed."""
        text = environment.get(VARIABLE)
        if text is None:
            raise ValueError(f"{VARIABLE} is not set: rank processes are started by their front")
        try:
            return msgspec.json.decode(text, type=RankStart)
        except msgspec.DecodeError as error:
            raise ValueError(f"{VARIABLE} is malformed: {error}") from error
