"""From many small copies to few large ones: a backend's cost is per range, not per byte."""

from collections.abc import Sequence
from operator import attrgetter

from transfer.api import Copy

Range = tuple[int, int, int]  # source offset, target offset, bytes


def merged_ranges(copies: Sequence[Copy], *, source_bytes: int, target_bytes: int) -> list[Range]:
    """`copies` in order of source offset, those adjacent on both sides made one.

    `source_bytes` and `target_bytes` are the sizes of the two buffers. ValueError for a copy
    that is empty or reaches outside either of them.
    """
    ranges: list[Range] = []
    for copy in sorted(copies, key=attrgetter("source_offset")):
        source, target, num_bytes = copy.source_offset, copy.target_offset, copy.num_bytes
        if num_bytes < 1:
            raise ValueError(f"a copy needs at least one byte, got {num_bytes}")
        if source < 0 or source + num_bytes > source_bytes:
            raise ValueError(f"{copy} reaches outside our buffer of {source_bytes} bytes")
        if target < 0 or target + num_bytes > target_bytes:
            raise ValueError(f"{copy} reaches outside the peer's buffer of {target_bytes} bytes")
        if ranges:
            last_source, last_target, last_bytes = ranges[-1]
            if last_source + last_bytes == source and last_target + last_bytes == target:
                ranges[-1] = (last_source, last_target, last_bytes + num_bytes)
                continue
        ranges.append((source, target, num_bytes))
    return ranges
