"""Where the parts of a token's row are as it travels between ranks (`kernels.moe.pack_tokens`)."""

from typing import NamedTuple

ROW_WORDS = 16


class PackedRow(NamedTuple):
    """Where the parts of a row begin, in words."""

    scales: int
    ids: int
    weights: int
    size: int

    @classmethod
    def of(
        cls,
        width: int,
        itemsize: int,
        num_choices: int,
        num_scales: int,
    ) -> "PackedRow":
        """Of `width` values of `itemsize` bytes each, as they travel."""
        scales = -(-width * itemsize // 4)
        ids = scales + num_scales
        weights = ids + num_choices
        size = -(-(weights + num_choices) // ROW_WORDS) * ROW_WORDS
        return cls(scales, ids, weights, size)
