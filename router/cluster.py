"""The parts of a router put together: events go into the table, its actions are performed."""

from core.clock import Clock
from core.log import get_logger
from core.prefix_index import PrefixIndex
from router.metrics import RouterMetrics
from router.scheduling.assign import Assigner
from router.scheduling.assignment_records import AssignmentRecords
from router.scheduling.pairing import rejections
from router.settings import RouterSettings
from router.workers.departures import Departures
from router.workers.table import Forget, Transition, WorkerEvent, WorkerTable
from router.workers.worker import WorkerState

log = get_logger("router.cluster")


class Cluster:
    """What the router knows of its workers, and who waits for them."""

    def __init__(self, settings: RouterSettings, clock: Clock, metrics: RouterMetrics) -> None:
        self.table = WorkerTable(pending_seconds=settings.pending_seconds)
        self.index = PrefixIndex(settings.prefix_index_pages)
        self.records = AssignmentRecords(settings.weights)
        self._departures = Departures()
        self.assigner = Assigner(
            self.table,
            self.index,
            clock,
            settings.weights,
            self.records,
            self._departures,
            max_waiting=settings.max_waiting,
            max_wait_seconds=settings.max_wait_seconds,
        )
        self._clock = clock
        self._metrics = metrics
        metrics.num_waiting.set_function(lambda: self.assigner.num_waiting)
        self._rejected: dict[str, str] = {}

    def apply(self, event: WorkerEvent) -> None:
        """Takes in what a worker, or discovery, said; whoever waits for room may find some."""
        now = self._clock.now()
        actions = self.table.step(event, now)
        for action in actions:
            match action:
                case Forget():
                    self.index.forget(action.epoch)
                case Transition():
                    _log_transition(action)
                    self._departures.note(action, now)
        if actions:
            self._metrics.show_workers(self.table.workers)
            self._log_rejections()
        self.assigner.wake()

    def _log_rejections(self) -> None:
        """Once for each address and reason: nothing else tells why it gets no requests."""
        found = rejections(self.table.workers)
        self._metrics.num_rejected.set(len(found))
        for rejection in found:
            worker = rejection.worker
            if self._rejected.get(worker.address) != rejection.reason:
                log.warning(
                    "worker gets no requests",
                    worker=worker.name,
                    worker_role=worker.role_name,
                    address=worker.address,
                    reason=rejection.reason,
                )
        self._rejected = {rejection.worker.address: rejection.reason for rejection in found}


def _log_transition(action: Transition) -> None:
    write = log.warning if action.after in (WorkerState.LOST, WorkerState.STALLED) else log.info
    write(
        f"worker is {action.after.value}",
        worker=action.worker.name,
        worker_role=action.worker.role_name,
        address=action.worker.address,
        epoch=action.worker.epoch,
        before=action.before.value if action.before is not None else "unknown",
        reason=action.reason,
    )
