"""Who may take a request at all: one yes-or-no function each, in one dict by name."""

from collections.abc import Callable

from proto.worker_pb2 import ROLE_PREFILL
from router.scheduling.demand import Demand
from router.workers.worker import Standing, Worker, WorkerState

Filter = Callable[[Worker, Demand], bool]


def registered(worker: Worker, _demand: Demand) -> bool:
    """It is up and has told which model it serves."""
    unknown = (WorkerState.REFUSED, WorkerState.LOST)
    return worker.state not in unknown and bool(worker.status.model)


def serves_model(worker: Worker, demand: Demand) -> bool:
    """model(worker) = model(request)"""
    return worker.status.model == demand.model


def ready(worker: Worker, _demand: Demand) -> bool:
    """Its ranks are up and go on, it does not drain, its stream lives."""
    return worker.state is WorkerState.READY


def fits(worker: Worker, demand: Demand) -> bool:
    """prompt tokens <= capacity: the model's context and the pages of one rank"""
    return demand.num_prompt_tokens <= worker.capacity_tokens


def not_excluded(worker: Worker, demand: Demand) -> bool:
    """It has not failed this very request before."""
    return worker.epoch not in demand.excluded


def not_held(worker: Worker, _demand: Demand) -> bool:
    """Discovery has nothing against it, such as a pod that is not ready; a preference only"""
    return worker.standing is not Standing.HELD


def not_slow(worker: Worker, _demand: Demand) -> bool:
    """Its steps take no multiple of their usual time; a preference only"""
    return not any(rank.slow for rank in worker.status.ranks)


def has_room(worker: Worker, _demand: Demand) -> bool:
    """decode: running + waiting + on their way < max_running, over all ranks; prefill: always
    (what waits there is bounded by the room at decode)"""
    return worker.role == ROLE_PREFILL or worker.num_requests < worker.load.max_running


FILTERS: dict[str, Filter] = {
    "registered": registered,
    "serves_model": serves_model,
    "ready": ready,
    "fits": fits,
    "not_excluded": not_excluded,
    "not_held": not_held,
    "has_room": has_room,
    "not_slow": not_slow,
}
