"""A pool of KV pages as it is after an hour of use: what is free lies in pieces.

pool = used_pool(8192, role="decode", seed=1, room=64)
runs = pool.allocate("a prompt", 64)
"""

import random
from typing import Literal

from engine.kv.pages import PagePool

PAGE_TOKENS = 64
# An hour of three requests a second.
NUM_REQUESTS = 3 * 3600
PROMPT_TOKENS = (64, 8192)
ANSWER_TOKENS = (16, 1024)
# Of all pages, what requests and cached prefixes are let to hold.
FULLEST = 0.95


def used_pool(
    num_pages: int,
    *,
    role: Literal["prefill", "decode"],
    seed: int,
    room: int,
    num_requests: int = NUM_REQUESTS,
) -> PagePool:
    """Requests of random lengths come and go in random order. On a decode rank they grow by a page
    now and then; on a prefill rank their pages stay as cached prefixes, which are given up for
    others, the oldest first. At the end `room` pages are free, made so in the same way."""
    rng = random.Random(seed)
    pool = PagePool(num_pages)
    fullest = int(FULLEST * num_pages)
    held: list[int] = []

    def free_one() -> None:
        pool.free(held.pop(0 if role == "prefill" else rng.randrange(len(held))))

    for request in range(num_requests):
        longest = min(PROMPT_TOKENS[1], fullest * PAGE_TOKENS // 4)
        prompt_pages = -(-rng.randint(PROMPT_TOKENS[0], longest) // PAGE_TOKENS)
        while num_pages - pool.num_free + prompt_pages > fullest and held:
            free_one()
        pool.allocate(request, prompt_pages)
        held.append(request)
        if role == "decode":
            grown = rng.randint(*ANSWER_TOKENS) // PAGE_TOKENS
            for _ in range(min(grown, pool.num_free - num_pages + fullest)):
                pool.grow(rng.choice(held))
    while pool.num_free < room:
        free_one()
    return pool
