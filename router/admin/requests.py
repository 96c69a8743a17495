"""What became of a request, put together from the router's records and those of all workers."""

from collections.abc import Sequence
from functools import partial

from core.errors import EpserveError, NotFound
from core.log import get_logger
from proto.router_pb2 import AdminExplainResponse, AssignmentRecord
from proto.worker_pb2 import ExplainRequestRequest, RequestLeg
from proto.worker_pb2_grpc import WorkerStub
from router.admin.processes import ANSWER_SECONDS, ask_all, dial
from router.workers.worker import Worker

log = get_logger("router.admin")


async def explain(
    request_id: str, assignments: Sequence[AssignmentRecord], workers: Sequence[Worker]
) -> AdminExplainResponse:
    """Asks all `workers`: another router may have assigned the request as well.

    Raises NotFound when nobody remembers it.
    """
    answers = await ask_all(partial(_legs, request_id), workers)
    legs: list[RequestLeg] = []
    silent: dict[str, str] = {}  # names of workers that do not answer, by epoch
    for worker, answer in zip(workers, answers, strict=True):
        if isinstance(answer, EpserveError):
            silent[worker.epoch] = worker.name
            log.warning("worker explains nothing", worker=worker.name, reason=answer.message)
        else:
            legs += answer
    if not assignments and not legs:
        raise NotFound(f"nobody remembers a request {request_id!r}")
    legs.sort(key=lambda leg: leg.accepted_at)
    return AdminExplainResponse(
        assignments=assignments, legs=legs, unreachable=_unreachable(assignments, workers, silent)
    )


async def _legs(request_id: str, worker: Worker) -> list[RequestLeg] | EpserveError:
    request = ExplainRequestRequest(request_id=request_id)
    try:
        async with dial(worker) as peer:
            reply = await WorkerStub(peer).ExplainRequest(request, timeout=ANSWER_SECONDS)
    except NotFound:
        return []
    except EpserveError as error:
        return error
    return list(reply.legs)


def _unreachable(
    assignments: Sequence[AssignmentRecord], workers: Sequence[Worker], silent: dict[str, str]
) -> list[str]:
    """Names of those that had a part in it, or may have had one, and say nothing."""
    if not assignments:
        return sorted(silent.values())
    there = {worker.epoch for worker in workers if worker.epoch not in silent}
    chosen = (
        candidate.worker
        for assignment in assignments
        for candidate in assignment.candidates
        if candidate.chosen
    )
    return sorted({worker.name for worker in chosen if worker.epoch not in there})
