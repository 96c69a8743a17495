"""How good a worker is for a request: functions with values in [0, 1], in dicts by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from router.scheduling.demand import Demand
from router.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that passed all filters; `num_matched_pages` leading pages of the prompt are
    probably in its prefix tree."""

    worker: Worker
    num_matched_pages: int = 0


Scorer = Callable[[Candidate, Demand], float]


def prefix_affinity(candidate: Candidate, demand: Demand) -> float:
    """matched pages * page tokens / prompt tokens"""
    matched_tokens = candidate.num_matched_pages * candidate.worker.status.page_tokens
    return min(1.0, matched_tokens / demand.num_prompt_tokens)


def load(candidate: Candidate, demand: Demand) -> float:
    """prompt tokens / (prompt tokens + tokens waiting before it on a rank)

    Relative to the prompt, because that is what a match saves: with weight 1/2 for
    prefix_affinity, going to the worker that has the whole prompt is right up to the point
    where as many tokens wait there as the match saves.
    """
    prompt = demand.num_prompt_tokens
    return prompt / (prompt + candidate.worker.waiting_tokens_per_rank)


def free_pages(candidate: Candidate, _demand: Demand) -> float:
    """(free pages - pages of requests on their way) / all pages"""
    worker = candidate.worker
    return min(1.0, worker.pages_free / max(1, worker.load.pages_total))


def free_slots(candidate: Candidate, _demand: Demand) -> float:
    """1 - (running + waiting + on their way) / max_running"""
    worker = candidate.worker
    return max(0.0, 1.0 - worker.num_requests / max(1, worker.load.max_running))


PREFILL_SCORERS: dict[str, Scorer] = {"prefix_affinity": prefix_affinity, "load": load}
DECODE_SCORERS: dict[str, Scorer] = {"free_pages": free_pages, "free_slots": free_slots}


class Scored(NamedTuple):
    """`scores` in the order of the scorers, `total` their weighted mean."""

    candidate: Candidate
    scores: tuple[float, ...]
    total: float


def score(
    candidate: Candidate,
    demand: Demand,
    scorers: Mapping[str, Scorer],
    weights: Mapping[str, float],
) -> Scored:
    """total = sum(weight * score) / sum(weights); 0 when all weights are 0"""
    scores = []
    weighted = sum_weights = 0.0
    for name, scorer in scorers.items():
        value, weight = scorer(candidate, demand), weights[name]
        scores.append(value)
        weighted += weight * value
        sum_weights += weight
    return Scored(candidate, tuple(scores), weighted / sum_weights if sum_weights else 0.0)
