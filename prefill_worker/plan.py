"""Which prompt tokens the next step computes: a pure function of a snapshot and a budget.

Requests are admitted by priority, equal ones in order of arrival, as long as their pages fit. The
first gets half of the budget, so that it always progresses; the rest goes by priority, and among
equal ones to those with least left to compute, so that a short prompt does not wait for a long
one before it. Chunks end at page borders, but for a prompt's last one: each page is complete in
exactly one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A request with tokens left to compute.

    num_tokens        of the whole prompt
    num_done_tokens   known already, a multiple of the page size; cached ones included
    num_pages_needed  pages it would take from the pool when it starts; 0 when it has started
    """

    attempt_id: str
    num_tokens: int
    num_done_tokens: int
    num_pages_needed: int
    priority: int = 0

    @property
    def num_left(self) -> int:
        return self.num_tokens - self.num_done_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens `begin` .. `end` of a prompt; `is_last` when `end` is the prompt's end."""

    attempt_id: str
    begin: int
    end: int
    is_last: bool


def plan_chunks(
    candidates: Sequence[Candidate],
    *,
    budget_tokens: int,
    page_tokens: int,
    num_available_pages: int,
) -> tuple[Chunk, ...]:
    """Chunks of at most `budget_tokens` together, in the order of `candidates`: higher priority
    first, then arrival.

    `budget_tokens` is at least a page. Not empty if there is a candidate that has started, or
    one whose pages are available.
    """
    assert budget_tokens >= page_tokens, (budget_tokens, page_tokens)
    admitted = _admit(candidates, num_available_pages)
    if not admitted:
        return ()
    oldest, *others = admitted
    # The half of the oldest; it also gets what the others leave.
    kept = _fit(oldest.num_left, max(budget_tokens // 2, page_tokens), page_tokens)
    left = budget_tokens - kept
    granted: dict[str, int] = {}
    for candidate in sorted(others, key=lambda other: (-other.priority, other.num_left)):
        granted[candidate.attempt_id] = _fit(candidate.num_left, left, page_tokens)
        left -= granted[candidate.attempt_id]
    granted[oldest.attempt_id] = _fit(oldest.num_left, kept + left, page_tokens)
    return tuple(
        Chunk(
            attempt_id=candidate.attempt_id,
            begin=candidate.num_done_tokens,
            end=candidate.num_done_tokens + granted[candidate.attempt_id],
            is_last=granted[candidate.attempt_id] == candidate.num_left,
        )
        for candidate in admitted
        if granted[candidate.attempt_id]
    )


def _admit(candidates: Sequence[Candidate], num_available_pages: int) -> list[Candidate]:
    """In their order, up to the first one whose pages do not fit: no other overtakes it for
    pages, or a large request might wait for ever."""
    admitted: list[Candidate] = []
    blocked = False
    for candidate in candidates:
        if candidate.num_pages_needed:
            blocked = blocked or candidate.num_pages_needed > num_available_pages
            if blocked:
                continue
            num_available_pages -= candidate.num_pages_needed
        admitted.append(candidate)
    return admitted


def _fit(num_left: int, budget_tokens: int, page_tokens: int) -> int:
    """All that is left, or as many whole pages as the budget allows."""
    if num_left <= budget_tokens:
        return num_left
    return budget_tokens // page_tokens * page_tokens
