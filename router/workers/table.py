"""All workers: a state machine without I/O or clock. Events in, actions out.

    event          from               may cause
    StatusArrived  a worker's stream  Transition, Forget (the address has a new epoch)
    StreamBroken   a worker's stream  Transition to LOST
    Stood          discovery          Transition (CLOSING: it gets no new requests)
    Left           discovery          Transition to LOST, Forget

A worker is addressed by its epoch; its address may have another worker tomorrow.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from proto.worker_pb2 import ROLE_DECODE, Role, WorkerStatus
from router.workers.completions import Completions
from router.workers.worker import Load, Pending, Standing, Worker, WorkerState, status_problem


@dataclass(frozen=True, slots=True)
class StatusArrived:
    address: str
    role: Role.ValueType
    status: WorkerStatus


@dataclass(frozen=True, slots=True)
class StreamBroken:
    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stood:
    """What discovery knows of whoever is at `address`, now and until it says otherwise."""

    address: str
    standing: Standing


@dataclass(frozen=True, slots=True)
class Left:
    """Whoever was at `address` is no member any more: another one may come there."""

    address: str


WorkerEvent = StatusArrived | StreamBroken | Stood | Left


@dataclass(frozen=True, slots=True)
class Transition:
    """A worker changed state (`before` is None for a new one), or what it serves."""

    worker: Worker
    before: WorkerState | None
    after: WorkerState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing more will ever be heard of this epoch."""

    epoch: str


Action = Transition | Forget


class WorkerTable:
    """`pending_seconds`: an assignment that its worker has not confirmed by then is dropped."""

    def __init__(self, *, pending_seconds: float = 5.0) -> None:
        self.completions = Completions()
        self._pending_seconds = pending_seconds
        self._by_address: dict[str, Worker] = {}
        self._standings: dict[str, Standing] = {}
        self._choice_numbers = itertools.count(1)

    @property
    def workers(self) -> Sequence[Worker]:
        """All of them, the lost ones included."""
        return tuple(self._by_address.values())

    def step(self, event: WorkerEvent, now: float) -> list[Action]:
        """Applies one event that happened at `now` (monotonic seconds)."""
        match event:
            case StatusArrived():
                return self._status_arrived(event, now)
            case StreamBroken():
                return self._stream_broken(event, now)
            case Stood():
                return self._stood(event)
            case Left():
                return self._left(event)

    def assigned(self, worker: Worker, pending: Pending) -> None:
        """`pending` goes on the account of `worker`."""
        worker.pending.append(pending)
        worker.last_chosen = next(self._choice_numbers)

    def released(self, worker: Worker, pending: Pending) -> None:
        """The caller went away before it learnt of the assignment."""
        if pending in worker.pending:
            worker.pending.remove(pending)

    def expire(self, now: float) -> None:
        """Drops assignments that were made too long ago to still be on their way."""
        for worker in self._by_address.values():
            pending = worker.pending
            while pending and now - pending[0].assigned_at >= self._pending_seconds:
                pending.popleft()

    def _status_arrived(self, event: StatusArrived, now: float) -> list[Action]:
        status = event.status
        # Peers reach it where the router does, not where it believes to listen (0.0.0.0).
        status.identity.address = event.address
        standing = self._standings.get(event.address, Standing.OPEN)
        status.draining |= standing is Standing.CLOSING
        problem = status_problem(status, event.role) or self._twin_problem(event)
        old = self._by_address.get(event.address)
        actions: list[Action] = []
        if old is None or old.epoch != status.identity.epoch:
            if old is not None:
                actions += self._forget(old)
                if not old.lost:
                    actions.append(Transition(old, old.state, WorkerState.LOST, "was restarted"))
            load = Load.of(status)
            worker = Worker(
                address=event.address,
                role=event.role,
                status=status,
                load=load,
                num_ended=status.num_accepted_total - load.num_requests,
            )
            self._by_address[event.address] = worker
            before, key = None, worker.key
        else:
            worker, before, key = old, old.state, old.key
            self._confirm(worker, status, now)
        worker.status, worker.load = status, Load.of(status)
        worker.problem, worker.lost, worker.standing = problem, False, standing
        if before is not worker.state or key != worker.key:
            actions.append(Transition(worker, before, worker.state, problem))
        return actions

    def _stream_broken(self, event: StreamBroken, now: float) -> list[Action]:
        worker = self._by_address.get(event.address)
        if worker is None or worker.lost:
            return []
        before, worker.lost = worker.state, True
        worker.lost_at, worker.lost_reason = now, event.reason
        return [Transition(worker, before, WorkerState.LOST, event.reason)]

    def _stood(self, event: Stood) -> list[Action]:
        self._standings[event.address] = event.standing
        worker = self._by_address.get(event.address)
        if worker is None:
            return []
        before, worker.standing = worker.state, event.standing
        # Taken back by the worker's next status, should its pod not be closing after all.
        worker.status.draining |= event.standing is Standing.CLOSING
        if worker.state is before:
            return []
        return [Transition(worker, before, worker.state, "its pod is terminating")]

    def _left(self, event: Left) -> list[Action]:
        self._standings.pop(event.address, None)
        worker = self._by_address.pop(event.address, None)
        if worker is None:
            return []
        actions = self._forget(worker)
        if not worker.lost:
            actions.append(Transition(worker, worker.state, WorkerState.LOST, "it left"))
        return actions

    def _forget(self, gone: Worker) -> list[Action]:
        """None where another address has the same process: it lives on there."""
        others = (worker for worker in self._by_address.values() if worker is not gone)
        is_known = any(worker.epoch == gone.epoch for worker in others)
        return [] if is_known else [Forget(gone.epoch)]

    def _confirm(self, worker: Worker, status: WorkerStatus, now: float) -> None:
        """Takes off what the worker has accepted since its last status, oldest first."""
        num_new = max(0, status.num_accepted_total - worker.status.num_accepted_total)
        for _ in range(min(num_new, len(worker.pending))):
            worker.pending.popleft()
        # A high-water mark: a request just accepted may not be among the running ones yet,
        # which for a moment looks like one that has ended.
        num_ended = status.num_accepted_total - Load.of(status).num_requests
        if worker.role == ROLE_DECODE and num_ended > worker.num_ended:
            self.completions.record(num_ended - worker.num_ended, now)
            worker.num_ended = num_ended

    def _twin_problem(self, event: StatusArrived) -> str:
        """The same process at two configured addresses would count twice."""
        for twin in self._by_address.values():
            if twin.epoch != event.status.identity.epoch or twin.address == event.address:
                continue
            if not (twin.lost or twin.problem):
                return f"it is already known by its address {twin.address}"
        return ""
