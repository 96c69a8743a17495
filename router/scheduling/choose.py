"""From all workers to one pair: filter, score, pick. Pure; says why when there is none."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from core.errors import ContextLengthExceeded, ModelNotFound, Unavailable
from core.prefix_index import PrefixIndex
from router.scheduling.demand import Demand
from router.scheduling.filters import FILTERS
from router.scheduling.pairing import Pool, complete, pools
from router.scheduling.scorers import DECODE_SCORERS, PREFILL_SCORERS, Candidate, Scored, score
from router.workers.worker import PairKey, Worker

ROLES = ("prefill", "decode")


# By role, then by the scorer's name.
Weights = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Pair:
    """`num_matched_pages` of the prompt are probably in the prefix tree of `prefill`."""

    prefill: Worker
    decode: Worker
    num_matched_pages: int


@dataclass(slots=True)
class Considered:
    """What became of each worker when a pair was looked for. `rejected` names the filter
    (`router.scheduling.filters`, or "paired": left without a partner) that left a worker out;
    all others were scored."""

    rejected: list[tuple[Worker, str]] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)


def choose(
    demand: Demand,
    workers: Sequence[Worker],
    index: PrefixIndex,
    weights: Weights,
    considered: Considered,
) -> Pair | None:
    """The best pair; None when all that could take the request are full. Tells `considered`
    what became of each worker.

    Raises Unavailable, ModelNotFound or ContextLengthExceeded when waiting would not help.
    """
    registered = _keep("registered", workers, demand, considered)
    if not registered:
        raise Unavailable("no worker is up")
    serving = _keep("serves_model", registered, demand, considered)
    if not serving:
        served = ", ".join(sorted({repr(worker.status.model) for worker in registered}))
        raise ModelNotFound(f"model {demand.model!r} does not exist; served here: {served}")
    ready = _keep("ready", serving, demand, considered)
    for role in ROLES:
        if not any(worker.role_name == role for worker in ready):
            raise Unavailable(f"no {role} worker is ready")
    paired = _complete(pools(ready), considered)
    if not paired:
        raise Unavailable("no prefill and decode worker that are up can work together")
    fitting = _narrow("fits", paired, demand, considered)
    if not fitting:
        raise ContextLengthExceeded(_too_long(demand, paired), param="prompt")
    allowed = _narrow("not_excluded", fitting, demand, considered)
    if not allowed:
        raise Unavailable("this request has failed on every prefill or every decode worker")
    preferred = _prefer("not_held", allowed, demand, considered)
    with_room = _narrow("has_room", preferred, demand, considered)
    if not with_room:
        return None
    with_room = _prefer("not_slow", with_room, demand, considered)
    best = [_best_pair(pool, demand, index, weights, considered) for pool in with_room.values()]
    # Of pools without a request, too, all get their share.
    return max(best, key=lambda scored: (scored[0], -scored[1].decode.last_chosen))[1]


def capacity_tokens(pool: Pool) -> int:
    """Longest prompt that some pair of this pool could take."""
    return min(
        max(worker.capacity_tokens for worker in pool.prefill),
        max(worker.capacity_tokens for worker in pool.decode),
    )


def _best_pair(
    pool: Pool, demand: Demand, index: PrefixIndex, weights: Weights, considered: Considered
) -> tuple[float, Pair]:
    prefill = [
        Candidate(worker, index.num_matched(worker.epoch, demand.prefix_hashes))
        for worker in pool.prefill
    ]
    scored_prefill = [score(one, demand, PREFILL_SCORERS, weights["prefill"]) for one in prefill]
    scored_decode = [
        score(Candidate(worker), demand, DECODE_SCORERS, weights["decode"])
        for worker in pool.decode
    ]
    considered.scored += scored_prefill
    considered.scored += scored_decode
    best_prefill, best_decode = _best(scored_prefill), _best(scored_decode)
    prefill_worker, decode_worker = best_prefill.candidate.worker, best_decode.candidate.worker
    pair = Pair(prefill_worker, decode_worker, best_prefill.candidate.num_matched_pages)
    return best_prefill.total + best_decode.total, pair


def _best(scored: Sequence[Scored]) -> Scored:
    """Equal scores go to the one that was chosen least recently."""
    return max(scored, key=lambda one: (one.total, -one.candidate.worker.last_chosen))


def _keep(
    name: str, workers: Iterable[Worker], demand: Demand, considered: Considered
) -> list[Worker]:
    passes = FILTERS[name]
    kept = []
    for worker in workers:
        if passes(worker, demand):
            kept.append(worker)
        else:
            considered.rejected.append((worker, name))
    return kept


def _prefer(
    name: str, paired: dict[PairKey, Pool], demand: Demand, considered: Considered
) -> dict[PairKey, Pool]:
    """Applies a filter inside each pool, to a role unless nobody of it passes."""

    def prefer(workers: list[Worker]) -> list[Worker]:
        if not any(FILTERS[name](worker, demand) for worker in workers):
            return workers
        return _keep(name, workers, demand, considered)

    return {key: Pool(prefer(pool.prefill), prefer(pool.decode)) for key, pool in paired.items()}


def _narrow(
    name: str, paired: dict[PairKey, Pool], demand: Demand, considered: Considered
) -> dict[PairKey, Pool]:
    """Applies a filter inside each pool; pools that lose a role fall away."""
    return _complete(
        {
            key: Pool(
                _keep(name, pool.prefill, demand, considered),
                _keep(name, pool.decode, demand, considered),
            )
            for key, pool in paired.items()
        },
        considered,
    )


def _complete(found: dict[PairKey, Pool], considered: Considered) -> dict[PairKey, Pool]:
    """`pairing.complete`, told to `considered` as a filter named paired."""
    whole = complete(found)
    for key, pool in found.items():
        if key not in whole:
            considered.rejected += [(worker, "paired") for worker in (*pool.prefill, *pool.decode)]
    return whole


def _too_long(demand: Demand, paired: dict[PairKey, Pool]) -> str:
    limit = max(capacity_tokens(pool) for pool in paired.values())
    return (
        f"the prompt has {demand.num_prompt_tokens} tokens; this cluster takes at most {limit} "
        "(the maximum context length, or the memory of a worker)"
    )
