"""One line of a memory plan: what something is, and how many bytes of the device it takes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerm:
    """`name` as it is logged: "weights: experts", "dispatch: receive buffers"."""

    name: str
    num_bytes: int
