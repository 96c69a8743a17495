"""How many tokens a rank may send at once, and in which pieces more of them go.

Both are pure functions of what all ranks know, so that all of them take the same steps.
"""

import math

TILE_ROWS = 128  # of a grouped product
# DeepEP's scales are read by a tensor copy engine, that of a multiple of 4 rows.
ROWS_MULTIPLE = 4


def decode_cap(max_running: int, num_ranks: int, draft_tokens: int = 0) -> int:
    """Tokens of a rank in one decode step at most: those of a full batch, each request with
    `draft_tokens` guesses after its token. Rounded up so that the blocks of rows that all ranks
    fill together are whole tiles of a grouped product. ValueError for no batch."""
    if max_running < 1 or draft_tokens < 0:
        raise ValueError(f"no batch: {max_running} requests with {draft_tokens} guesses each")
    multiple = max(ROWS_MULTIPLE, TILE_ROWS // math.gcd(TILE_ROWS, num_ranks))
    tokens = max_running * (1 + draft_tokens)
    return -(-tokens // multiple) * multiple


def sub_steps(tokens_per_rank: tuple[int, ...], cap: int) -> tuple[tuple[slice, ...], ...]:
    """[sub-step][rank]: which of the rank's tokens go in it, `cap` of them at most.
    As few sub-steps as the longest rank needs, at least one. The tokens of every rank are spread
    evenly over them, in order. ValueError for a cap below 1."""
    if cap < 1:
        raise ValueError(f"cap must be at least 1, got {cap}")
    num_steps = max(1, -(-max(tokens_per_rank) // cap))
    return tuple(
        tuple(
            slice(num_tokens * step // num_steps, num_tokens * (step + 1) // num_steps)
            for num_tokens in tokens_per_rank
        )
        for step in range(num_steps)
    )
