"""What a decode rank does next: who steps, who gets a page, who is put back, who is let in.

    1. Running requests are served by rank: higher priorities first, equal ones oldest first. One
       that needs a page and finds none free takes those of the running request that ranks last,
       which is preempted. One that finds none after it stalls: it sits this step out and
       keeps its pages. Pages that only drafts would use are given out last, while some are free.
    2. Waiting requests are let in by rank, the first one first and no later one before it, while
       there are pages for all their tokens and a headroom for those that grow. Not in a step
       in which a request was preempted or stalled.

The request that ranks first thus always progresses, or waits only for pages that come back within a
bound (of prefills and last steps under way, or in quarantine): no request is stuck, and none
starves but for requests of higher priority.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Headroom: one page for each request that is in, but never more than this part of the pool.
HEADROOM_DIVISOR = 16


class RequestView(NamedTuple):
    """A request as the planner sees it; tokens in flight are counted. `num_ahead` more would be
    written if there were room."""

    request_id: str
    num_tokens: int
    num_pages: int
    num_ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`running` and `waiting` by rank. `num_prefilling` requests hold pages and places, and so do
    `num_landing` ones, whose last token is in flight."""

    running: Sequence[RequestView]
    waiting: Sequence[RequestView]
    num_prefilling: int
    num_landing: int = 0
    pages_free: int
    pages_total: int
    page_tokens: int
    max_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Request ids. To be carried out in this order: preempt, grow, admit, step. Those to be
    preempted must not be in flight: their pages are wanted at once. `grow` names a request once
    for each page."""

    preempt: tuple[str, ...] = ()
    grow: tuple[str, ...] = ()
    admit: tuple[str, ...] = ()
    step: tuple[str, ...] = ()


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold the KV of so many tokens."""
    return -(-num_tokens // page_tokens)


def plan(snapshot: Snapshot) -> Plan:
    """The next step, see above. Depends on nothing but the snapshot."""
    free = snapshot.pages_free
    kept = list(snapshot.running)  # shrinks from its end
    preempt: list[str] = []
    grow: list[str] = []
    step: list[str] = []
    index = 0
    while index < len(kept):
        request = kept[index]
        if pages_for(request.num_tokens, snapshot.page_tokens) > request.num_pages:
            while free == 0 and len(kept) > index + 1:
                victim = kept.pop()
                preempt.append(victim.request_id)
                free += victim.num_pages
            if free == 0:
                break  # stalled, and no request is left after it
            free -= 1
            grow.append(request.request_id)
        step.append(request.request_id)
        index += 1
    stalled = index < len(kept)
    admit = [] if preempt or stalled else _admitted(snapshot, free)
    if not preempt and not stalled and not admit:
        grow += _grown_ahead(snapshot, grow, free)
    return Plan(preempt=tuple(preempt), grow=tuple(grow), admit=tuple(admit), step=tuple(step))


def _grown_ahead(snapshot: Snapshot, grow: Sequence[str], free: int) -> list[str]:
    """Requests by rank, once for each page that their drafts want and find."""
    grown: list[str] = []
    for request in snapshot.running:
        wanted = pages_for(request.num_tokens + request.num_ahead, snapshot.page_tokens)
        missing = wanted - request.num_pages - (request.request_id in grow)
        grown += [request.request_id] * min(missing, free - len(grown))
    return grown


def _admitted(snapshot: Snapshot, free: int) -> list[str]:
    num_in = len(snapshot.running) + snapshot.num_prefilling + snapshot.num_landing
    most_headroom = max(1, snapshot.pages_total // HEADROOM_DIVISOR)
    admit: list[str] = []
    for request in snapshot.waiting:
        need = pages_for(request.num_tokens, snapshot.page_tokens)
        # The first one in needs none: no other one grows, and alone it fits (checked on entry).
        headroom = min(num_in, most_headroom)
        if num_in >= snapshot.max_running or need + headroom > free:
            break
        free -= need
        num_in += 1
        admit.append(request.request_id)
    return admit
