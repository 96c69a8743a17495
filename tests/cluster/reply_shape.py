"""What two replies to one request must have in common."""

import json
import re
from typing import Any

# Differ from run to run by their nature: when, under which name, how much of the prompt some
# earlier request had left in a prefix cache, and what was drafted.
_OF_THE_RUN = (
    (re.compile(rb'"id":"(chatcmpl|cmpl|call)[-_][^"]*"'), rb'"id":"*"'),
    (re.compile(rb'"created":\d+'), rb'"created":0'),
    (re.compile(rb'"(accepted|rejected)_prediction_tokens":\d+,?'), b""),
    (re.compile(rb",}"), b"}"),
    (re.compile(rb',"completion_tokens_details":{}'), b""),
    (re.compile(rb'"(cached_tokens|prompt_cache_(?:hit|miss)_tokens)":\d+'), rb'"\1":0'),
)

# Sums in FP32 are rounded differently in batches of another size.
LOGPROB_TOLERANCE = 1e-4


def without_run(body: bytes) -> bytes:
    """The body's bytes, ids and times aside."""
    for pattern, replacement in _OF_THE_RUN:
        body = pattern.sub(replacement, body)
    return body


def canonical(reply: dict[str, Any]) -> bytes:
    """One spelling for equal JSON, ids and times aside."""
    text = json.dumps(reply, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return without_run(text.encode())


def same_but_for_rounding(left: Any, right: Any) -> bool:
    """Equal JSON values; floating point numbers, which only log-probabilities are, may differ by
    what another batch size makes of them."""
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) <= LOGPROB_TOLERANCE
    if isinstance(left, dict) and isinstance(right, dict):
        if set(left) != set(right):
            return False
        return all(same_but_for_rounding(left[name], right[name]) for name in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_but_for_rounding, left, right))
    return bool(left == right)
