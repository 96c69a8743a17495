"""Prompts of exact lengths, the same ones for everybody who has the seed."""

import random
from collections.abc import Sequence

# Ids that every byte-level vocabulary has and that are not special in the DeepSeek family.
FIRST_TOKEN_ID = 16
LAST_TOKEN_ID = 255

_WORDS = (
    "answer", "bridge", "copper", "engine", "forest", "garden", "harbor", "lantern", "letter",
    "market", "morning", "mountain", "music", "number", "paper", "people", "question", "river",
    "silver", "station", "stone", "travel", "window", "winter",
)  # fmt: skip


def token_prompts(
    seed: int, num_prompts: int, num_tokens: int, *, shared_prefix_tokens: int = 0
) -> list[list[int]]:
    """Random token ids [num_prompts][num_tokens]; the first `shared_prefix_tokens` are equal.

    Two prompts of one call practically never share more than that, so that no prefix cache
    helps unless it is asked to. Raises ValueError for a prefix longer than the prompt.
    """
    if not 0 <= shared_prefix_tokens <= num_tokens:
        raise ValueError(f"a prefix of {shared_prefix_tokens} tokens in prompts of {num_tokens}")
    source = random.Random(f"epserve-bench-{seed}-{num_tokens}")
    prefix = _token_ids(source, shared_prefix_tokens)
    rest = num_tokens - shared_prefix_tokens
    return [prefix + _token_ids(source, rest) for _ in range(num_prompts)]


def chat_prompts(seed: int, num_prompts: int, num_words: int) -> list[str]:
    """Random words; how many tokens they make is the tokenizer's business."""
    source = random.Random(f"epserve-bench-chat-{seed}-{num_words}")
    return [" ".join(source.choices(_WORDS, k=num_words)) for _ in range(num_prompts)]


def arrival_times(seed: int, num_requests: int, requests_per_second: float) -> Sequence[float]:
    """Seconds from the start at which requests of a Poisson process arrive; the first at 0."""
    if requests_per_second <= 0:
        raise ValueError(f"a rate of {requests_per_second} requests/s")
    source = random.Random(f"epserve-bench-arrivals-{seed}")
    times = [0.0]
    while len(times) < num_requests:
        times.append(times[-1] + source.expovariate(requests_per_second))
    return times[:num_requests]


def _token_ids(source: random.Random, num_tokens: int) -> list[int]:
    return [source.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(num_tokens)]
