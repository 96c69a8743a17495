"""What the planner gets to know of a rank's requests."""

from collections.abc import Sequence

from decode_worker.events import RankFacts
from decode_worker.plan import RequestView, Snapshot
from decode_worker.request import Request
from engine.kv.pages import PagePool


def snapshot_of(
    running: Sequence[Request],
    waiting: Sequence[Request],
    num_prefilling: int,
    pool: PagePool,
    facts: RankFacts,
) -> Snapshot:
    """`running` and `waiting` by rank. Tokens in flight are taken as known: whether one of them
    ends its request shows when it lands. Who sits steps out is landing, too."""
    going_on = [
        request
        for request in running
        if not request.sits_out and not _ends_in_flight(request, facts)
    ]
    counts = pool.counts()
    return Snapshot(
        running=[_view(request, facts) for request in going_on],
        waiting=[_view(request, facts) for request in waiting],
        num_prefilling=num_prefilling,
        num_landing=len(running) - len(going_on),
        pages_free=counts.free,
        pages_total=counts.total,
        page_tokens=facts.page_tokens,
        max_running=facts.max_running,
    )


def _ends_in_flight(request: Request, facts: RankFacts) -> bool:
    """Whether what is in flight is the last token, whatever it is."""
    return request.num_in_flight > 0 and request.num_to_come(facts.max_model_len) <= 0


def _view(request: Request, facts: RankFacts) -> RequestView:
    return RequestView(
        request_id=request.request_id,
        num_tokens=request.num_known_soon,
        num_pages=len(request.pages),
        num_ahead=_num_ahead(request, facts),
    )


def _num_ahead(request: Request, facts: RankFacts) -> int:
    """Tokens after the known ones whose KV a step may write: drafts that it verifies, and all but
    the last of those that it makes, none that would be past the end."""
    to_come = request.num_to_come(facts.max_model_len)
    return max(0, min(2 * facts.speculative_tokens - 1, to_come - 1))
