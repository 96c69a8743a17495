"""One worker as the router knows it: what it last said, and what was assigned since."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from core.errors import InvalidRequest
from proto import worker_pb2
from proto.router_pb2 import WorkerRef
from proto.worker_pb2 import ROLE_PREFILL, ProcessIdentity, Role, WorkerStatus
from router.identity_check import check_identity


class Standing(IntEnum):
    """What discovery knows beyond the worker's own word, which decides in all else.

    OPEN     nothing against it
    HELD     gets a request only when no other worker of its role could take it, now or later
    CLOSING  on its way out: no new requests, but watched until it is gone
    """

    CLOSING = 0
    HELD = 1
    OPEN = 2


class WorkerState(Enum):
    """Only READY workers are given requests.

    LOADING   up, its ranks are not
    READY     takes requests
    STALLED   a rank of it ends no steps
    DRAINING  finishes what it has, because it was told to or its pod is terminating
    REFUSED   says something that cannot be true; `Worker.problem` says what
    LOST      its stream broke or fell silent; forgotten when its address has another epoch, or
              when it leaves
    """

    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"
    DRAINING = "draining"
    REFUSED = "refused"
    LOST = "lost"


class PairKey(NamedTuple):
    """A prefill and a decode worker can work together if these are equal."""

    model: str
    kv_fingerprint: str
    page_tokens: int
    pairing_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sums over a worker's ranks; `num_requests` run or wait, `waiting_tokens` are prompt
    tokens not computed yet, `largest_rank_pages` is the largest pool of a single rank."""

    num_ranks: int
    num_requests: int
    max_running: int
    pages_free: int
    pages_total: int
    largest_rank_pages: int
    waiting_tokens: int

    @classmethod
    def of(cls, status: WorkerStatus) -> "Load":
        ranks = status.ranks
        return cls(
            num_ranks=len(ranks),
            num_requests=sum(rank.num_running + rank.num_waiting for rank in ranks),
            max_running=sum(rank.max_running for rank in ranks),
            pages_free=sum(rank.pages_free for rank in ranks),
            pages_total=sum(rank.pages_total for rank in ranks),
            largest_rank_pages=max((rank.pages_total for rank in ranks), default=0),
            waiting_tokens=sum(rank.num_waiting_tokens for rank in ranks),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pending:
    """An assignment that its worker's status does not show yet. `assigned_at` in seconds;
    `num_tokens` prompt tokens to compute, `num_pages` pages to hold."""

    assigned_at: float
    num_tokens: int
    num_pages: int


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """Mutable record, written by `router.workers.table` only. `address` is the one the router
    dials; `last_chosen` numbers the choices; `num_ended` requests were accepted and are no more.
    `lost_at` and `lost_reason` are of the last time that it was lost, in seconds."""

    address: str
    role: Role.ValueType
    status: WorkerStatus
    load: Load
    problem: str = ""
    lost: bool = False
    lost_at: float = 0.0
    lost_reason: str = ""
    standing: Standing = Standing.OPEN
    pending: deque[Pending] = field(default_factory=deque)
    last_chosen: int = 0
    num_ended: int = 0

    @property
    def identity(self) -> ProcessIdentity:
        return self.status.identity

    @property
    def epoch(self) -> str:
        return self.status.identity.epoch

    @property
    def name(self) -> str:
        return self.status.identity.name

    def reference(self) -> WorkerRef:
        return WorkerRef(address=self.address, epoch=self.epoch, name=self.name)

    @property
    def role_name(self) -> str:
        return role_name(self.role)

    @property
    def key(self) -> PairKey:
        status = self.status
        return PairKey(
            status.model, status.kv_fingerprint, status.page_tokens, status.pairing_version
        )

    @property
    def state(self) -> WorkerState:
        if self.lost:
            return WorkerState.LOST
        if self.problem:
            return WorkerState.REFUSED
        if self.status.draining:
            return WorkerState.DRAINING
        if self.status.ready:
            return WorkerState.READY
        is_stalled = any(rank.stalled for rank in self.status.ranks)
        return WorkerState.STALLED if is_stalled else WorkerState.LOADING

    @property
    def num_requests(self) -> int:
        """Requests that run, wait, or are on their way."""
        return self.load.num_requests + len(self.pending)

    @property
    def pages_free(self) -> int:
        """Pages left once what is on its way has taken its share, at least 0."""
        return max(0, self.load.pages_free - sum(entry.num_pages for entry in self.pending))

    @property
    def waiting_tokens_per_rank(self) -> float:
        """Prompt tokens before a new request, those on their way included."""
        on_the_way = sum(entry.num_tokens for entry in self.pending)
        return (self.load.waiting_tokens + on_the_way) / max(1, self.load.num_ranks)

    @property
    def capacity_tokens(self) -> int:
        """Longest prompt this worker could ever take: within the model's context, and in the
        pages of one rank; both leave room for one token of output at decode."""
        in_pages = self.load.largest_rank_pages * self.status.page_tokens
        if self.role != ROLE_PREFILL:
            in_pages -= 1
        return min(self.status.max_model_len - 1, in_pages)


def role_name(role: Role.ValueType) -> str:
    """`prefill`, `decode`, ...; "role 17" for one this version does not know."""
    if role not in worker_pb2.Role.values():
        return f"role {role}"
    return worker_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def status_problem(status: WorkerStatus, role: Role.ValueType) -> str:
    """Why a status cannot be that of a worker configured as `role`; "" if it can."""
    if status.identity.role != role:
        return f"it is a {role_name(status.identity.role)} worker, configured as {role_name(role)}"
    if not status.identity.epoch:
        return "it has no epoch"
    try:
        check_identity(status.identity)
    except InvalidRequest as error:
        return f"its {error.message}"
    if not status.ready:
        return ""
    missing = [
        name
        for name in ("model", "kv_fingerprint", "page_tokens", "max_model_len", "ranks")
        if not getattr(status, name)
    ]
    if missing:
        return f"it is ready but does not tell its {', '.join(missing)}"
    if any(rank.max_running == 0 or rank.pages_total == 0 for rank in status.ranks):
        return "a rank of it can run nothing (max_running or pages_total is 0)"
    return ""
