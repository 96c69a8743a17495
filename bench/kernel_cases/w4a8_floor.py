"""What a W4A8 grouped product cannot do without. Torch-free."""

from dataclasses import dataclass

# Dense rate of an H100 or H200, from the data sheet: it bounds what no clock reaches.
FP8_FLOPS = 1979e12
GROUP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class W4a8Shape:
    """Int4 weights [E, N, K] with a scale of 16 bits for each 128 along K. `is_gated`: half of what
    comes out gates the other half, and the result is FP8."""

    num_experts: int
    n: int
    k: int
    is_gated: bool = False

    def floor_microseconds(self, rows: int, bytes_per_second: float) -> float:
        """Of weights, scales, and `rows` of each expert in (FP8) and out (BF16 unless gated); or of
        FP8 matrix instructions."""
        num_bytes = self.num_experts * self.n * self.k * (0.5 + 2 / GROUP)
        num_bytes += self.num_experts * rows * (self.k + self.n * (0.5 if self.is_gated else 2))
        flops = 2.0 * self.num_experts * rows * self.n * self.k
        return 1e6 * max(num_bytes / bytes_per_second, flops / FP8_FLOPS)
