"""From all workers to one pair: filter, score, pick. Pure; says why when there is none."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from core.errors import ContextLengthExceeded, ModelNotFound, Unavailable
from router.demand import Demand
from router.filters import FILTERS
from router.pairing import Pool, complete, pools
from router.prefix_index import PrefixIndex
from router.scorers import DECODE_SCORERS, PREFILL_SCORERS, Candidate, weighted_score
from router.worker import PairKey, Worker

ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weight of each scorer, by its name."""

    prefill: Mapping[str, float]
    decode: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Candidate
    decode: Candidate


def choose(
    demand: Demand, workers: Sequence[Worker], index: PrefixIndex, weights: Weights
) -> Pair | None:
    """The best pair; None when all that could take the request are full.

    Raises Unavailable, ModelNotFound or ContextLengthExceeded when waiting would not help.
    """
    registered = _keep("registered", workers, demand)
    if not registered:
        raise Unavailable("no worker is up")
    serving = _keep("serves_model", registered, demand)
    if not serving:
        served = ", ".join(sorted({repr(worker.status.model) for worker in registered}))
        raise ModelNotFound(f"model {demand.model!r} does not exist; served here: {served}")
    ready = _keep("ready", serving, demand)
    for role in ROLES:
        if not any(worker.role_name == role for worker in ready):
            raise Unavailable(f"no {role} worker is ready")
    paired = complete(pools(ready))
    if not paired:
        raise Unavailable("no prefill and decode worker that are up can work together")
    fitting = _narrow("fits", paired, demand)
    if not fitting:
        raise ContextLengthExceeded(_too_long(demand, paired), param="prompt")
    allowed = _narrow("not_excluded", fitting, demand)
    if not allowed:
        raise Unavailable("this request has failed on every prefill or every decode worker")
    with_room = _narrow("has_room", allowed, demand)
    if not with_room:
        return None
    best = [_best_pair(pool, demand, index, weights) for pool in with_room.values()]
    return max(best, key=lambda scored: scored[0])[1]


def capacity_tokens(pool: Pool) -> int:
    """Longest prompt that some pair of this pool could take."""
    return min(
        max(worker.capacity_tokens for worker in pool.prefill),
        max(worker.capacity_tokens for worker in pool.decode),
    )


def _best_pair(
    pool: Pool, demand: Demand, index: PrefixIndex, weights: Weights
) -> tuple[float, Pair]:
    prefill = [
        Candidate(worker, index.num_matched(worker.epoch, demand.prefix_hashes))
        for worker in pool.prefill
    ]
    decode = [Candidate(worker) for worker in pool.decode]

    def prefill_score(candidate: Candidate) -> float:
        return weighted_score(candidate, demand, PREFILL_SCORERS, weights.prefill)

    def decode_score(candidate: Candidate) -> float:
        return weighted_score(candidate, demand, DECODE_SCORERS, weights.decode)

    # Equal scores go to the one that was chosen least recently.
    best_prefill = max(prefill, key=lambda one: (prefill_score(one), -one.worker.last_chosen))
    best_decode = max(decode, key=lambda one: (decode_score(one), -one.worker.last_chosen))
    score = prefill_score(best_prefill) + decode_score(best_decode)
    return score, Pair(best_prefill, best_decode)


def _keep(name: str, workers: Iterable[Worker], demand: Demand) -> list[Worker]:
    passes = FILTERS[name]
    return [worker for worker in workers if passes(worker, demand)]


def _narrow(name: str, paired: dict[PairKey, Pool], demand: Demand) -> dict[PairKey, Pool]:
    """Applies a filter inside each pool; pools that lose a role fall away."""
    return complete(
        {
            key: Pool(_keep(name, pool.prefill, demand), _keep(name, pool.decode, demand))
            for key, pool in paired.items()
        }
    )


def _too_long(demand: Demand, paired: dict[PairKey, Pool]) -> str:
    limit = max(capacity_tokens(pool) for pool in paired.values())
    return (
        f"the prompt has {demand.num_prompt_tokens} tokens; this cluster takes at most {limit} "
        "(the maximum context length, or the memory of a worker)"
    )
