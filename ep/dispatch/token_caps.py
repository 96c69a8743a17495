"""How many tokens a rank may send at once, and in which pieces more of them go.

Both are pure functions of what all ranks know, so that all of them take the same steps.
"""

import math

TILE_ROWS = 128  # of a grouped product
# DeepEP's scales are read by a tensor copy engine, that of a multiple of 4 rows.
ROWS_MULTIPLE = 4


def decode_cap(tokens: int, num_ranks: int) -> int:
    """`tokens` of a rank in one decode step, rounded up so that the blocks of rows that all ranks
    fill together are whole tiles of a grouped product. ValueError for no batch."""
    if tokens < 1:
        raise ValueError(f"no batch: {tokens} tokens")
    multiple = max(ROWS_MULTIPLE, TILE_ROWS // math.gcd(TILE_ROWS, num_ranks))
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
