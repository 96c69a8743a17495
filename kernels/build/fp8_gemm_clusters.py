"""How the CUDA path of `kernels.gemm.fp8_gemm` cuts a product of few tokens: pure functions of its
shape."""

from dataclasses import dataclass

MAX_ROWS = 128
HEIGHTS = (8, 16, 32, 64, 96, 128)  # tokens that the kernel is compiled for
MAX_CLUSTER = 8  # thread blocks: more than that is not everywhere possible
TOKEN_STAGES = 3  # with tokens first: the L2 cache has them, and memory the weights
MULTIPROCESSOR_BYTES = 228 * 1024  # of shared memory
RESERVED_BYTES = 1024  # of each thread block
BARRIER_BYTES = 16
MULTIPROCESSORS = 132  # of an H200; another number costs speed only


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBlocks:
    """`warpgroups` x 64 rows of weights and all tokens a thread block. In a cluster `across`
    neighbours in rows copy tokens for each other and `splits` blocks share a sum. As many stages
    are in flight as fit where `per_multiprocessor` blocks are to run at once.

    `tokens_first`: up to MAX_ROWS tokens are the first operand of the matrix instruction, not the
    weights. There is one such kernel: 2 warpgroups, `across` 1, one block a multiprocessor."""

    warpgroups: int
    across: int
    splits: int
    per_multiprocessor: int
    tokens_first: bool = False

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2, 3) or self.across not in (1, 2, 4):
            raise ValueError(f"blocks that no kernel has: {self}")
        if self.tokens_first and (self.warpgroups, self.across) != (2, 1):
            raise ValueError(f"blocks that no kernel has: {self}")
        if self.splits < 1 or self.across * self.splits > MAX_CLUSTER:
            raise ValueError(f"a cluster is of 1 to {MAX_CLUSTER} blocks: {self}")

    def height(self, rows: int) -> int:
        """Tokens of the kernel that has room for `rows`."""
        return MAX_ROWS if self.tokens_first else height_of(rows)

    def num_stages(self, rows: int, k: int) -> int:
        """Of weights; 0 where they do not fit."""
        height, steps = self.height(rows), self._num_steps(k)
        room = MULTIPROCESSOR_BYTES // self.per_multiprocessor - RESERVED_BYTES - BARRIER_BYTES
        weight_bytes, token_bytes = 128 * 64 * self.warpgroups + 16, 132 * height
        if self.tokens_first:  # what blocks send each other lies where the stages were
            room -= self.token_stages(rows, k) * (token_bytes + 8)
            return min(room // weight_bytes, steps)
        if self.splits > 1:  # parts of sums that blocks send each other
            room -= 16 * 128 * self.warpgroups * self.splits * -(-height // 8 // self.splits)
        stages = min(room // (weight_bytes + token_bytes), steps)
        # Sums that are not shared lie where the stages were.
        sum_bytes = 4 * height * (64 * self.warpgroups + 4)
        return stages if sum_bytes + stages * (4 * height + 16) <= room else 0

    def token_stages(self, rows: int, k: int) -> int:
        """As many as of weights, unless tokens are first."""
        if not self.tokens_first:
            return self.num_stages(rows, k)
        return min(TOKEN_STAGES, self._num_steps(k))

    def _num_steps(self, k: int) -> int:
        """Groups of columns of a block, at most."""
        return -(-(k // 128) // self.splits)


def height_of(rows: int) -> int:
    """Tokens of the kernel that has room for `rows`."""
    return next(height for height in HEIGHTS if height >= rows)
