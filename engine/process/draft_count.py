"""How many drafts a step verifies for each request: as many as pay.

A draft costs a row of each request, whether it is right or not. What that takes depends on how many
requests there are, what it brings on how often drafts are right, lately.
"""

from collections.abc import Sequence

# Times of a step with 1, 2 and 3 drafts a request, in steps without, for up to so many requests:
# the dearer of W4A8 and FP8 experts on one H200, 61 layers, requests of 2,048 tokens, with launch
# and wait (bench/results/decode_rank.jsonl: `bench.decode_rank --speculative 0 1 2 3`). Of sizes
# that were not measured, the dearer neighbour's; more requests were not measured: none for them.
STEP_TIMES: dict[int, tuple[float, ...]] = {
    7: (1.54, 2.01, 2.47),
    32: (1.23, 1.50, 1.68),
    64: (1.39, 1.90, 2.22),
    128: (1.62, 2.70, 2.94),
}
MOST_REQUESTS = max(STEP_TIMES)
# Of drafts behind right ones, as it is with the layer that DeepSeek-V3 ships.
FIRST_SHARE = 0.84
# What one draft counts in the share of its request, and in that of its rank.
OF_REQUEST, OF_RANK = 1 / 16, 1 / 256
TRIED_EVERY = 128  # steps


def draft_count(share: float, num_requests: int, most: int) -> int:
    """The number up to `most` that brings most tokens in a time, when `share` of the drafts behind
    right ones are right."""
    times = next((row for size, row in STEP_TIMES.items() if num_requests <= size), None)
    if times is None:
        return 0
    further = (times[2] - times[0]) / 2  # of each draft that was not measured
    best, best_rate, tokens = 0, 1.0, 1.0
    for count in range(1, most + 1):
        tokens += share**count
        time = times[count - 1] if count <= len(times) else times[-1] + further * (count - 3)
        if tokens / time > best_rate:
            best, best_rate = count, tokens / time
    return best


def drafts_that_pay(shares: Sequence[float], most: int, num_steps: int) -> int:
    """Of a step of requests with these shares. Where none pay, one is tried now and then: for two
    steps of all ranks, which makes it and verifies it."""
    if not shares or not most or len(shares) > MOST_REQUESTS:
        return 0
    count = draft_count(sum(shares) / len(shares), len(shares), most)
    return count or int(num_steps % TRIED_EVERY < 2)


def own_drafts(share: float, num_requests: int, num_drafts: int) -> int:
    """Of one request in a step of `num_drafts`: one at least, by which its share is known."""
    return min(num_drafts, max(1, draft_count(share, num_requests, num_drafts)))


def share_after(share: float, num_proposed: int, num_accepted: int, weight: float) -> float:
    """With what became of a step's drafts; those behind a wrong one say nothing."""
    for index in range(min(num_proposed, num_accepted + 1)):
        share += weight * ((index < num_accepted) - share)
    return share
