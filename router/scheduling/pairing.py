"""Which workers can work together, and which can with nobody."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from router.workers.worker import PairKey, Worker, WorkerState


@dataclass(slots=True)
class Pool:
    """Workers of equal PairKey, by role."""

    prefill: list[Worker] = field(default_factory=list)
    decode: list[Worker] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rejection:
    worker: Worker
    reason: str


def pools(workers: Iterable[Worker]) -> dict[PairKey, Pool]:
    """Workers grouped by what must be equal; a pool may lack a role."""
    found: dict[PairKey, Pool] = {}
    for worker in workers:
        pool = found.setdefault(worker.key, Pool())
        (pool.prefill if worker.role == ROLE_PREFILL else pool.decode).append(worker)
    return found


def complete(found: dict[PairKey, Pool]) -> dict[PairKey, Pool]:
    """Only the pools that have both roles."""
    return {key: pool for key, pool in found.items() if pool.prefill and pool.decode}


def paired(workers: Iterable[Worker]) -> list[Worker]:
    """Those that take requests, and have a partner that does."""
    ready = (worker for worker in workers if worker.state is WorkerState.READY)
    whole = complete(pools(ready)).values()
    return [worker for pool in whole for worker in (*pool.prefill, *pool.decode)]


def rejections(workers: Iterable[Worker]) -> list[Rejection]:
    """Workers that are up but get nothing: their status is impossible, or no worker of the
    other role matches although there are some."""
    present = list(workers)
    rejected = [
        Rejection(worker, worker.problem)
        for worker in present
        if worker.state is WorkerState.REFUSED
    ]
    up = [
        worker
        for worker in present
        if worker.status.ready and worker.state in (WorkerState.READY, WorkerState.DRAINING)
    ]
    # One that drains gets nothing in any case, and may well be the last of its version.
    for worker in (one for one in up if one.state is WorkerState.READY):
        other_role = ROLE_DECODE if worker.role == ROLE_PREFILL else ROLE_PREFILL
        others = [other for other in up if other.role == other_role]
        if others and all(other.key != worker.key for other in others):
            rejected.append(Rejection(worker, _difference(worker, others[0])))
    return rejected


def _difference(worker: Worker, other: Worker) -> str:
    names = {
        "model": "model",
        "kv_fingerprint": "KV fingerprint",
        "page_tokens": "page_tokens",
        "pairing_version": "pairing version",
    }
    differing = [
        f"{text} {getattr(worker.key, name)!r} (there {getattr(other.key, name)!r})"
        for name, text in names.items()
        if getattr(worker.key, name) != getattr(other.key, name)
    ]
    return (
        f"matches no {other.role_name} worker; it differs from {other.name or other.address} "
        f"in {', '.join(differing)}"
    )
