"""Which rank holds which expert.

A physical expert id names a slot of a rank: `physical = rank * slots_per_rank + slot`. Every
rank has the same number of slots, some of which may be empty when the experts do not divide
evenly; used slots come first, so that a rank's experts are slots 0 .. len(local_experts) - 1.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A map from logical experts (as the gate names them) to physical ones.

    num_ranks            ranks of the EP group
    slots_per_rank       physical experts a rank, empty slots included
    logical_to_physical  physical id of each logical expert
    """

    num_ranks: int
    slots_per_rank: int
    logical_to_physical: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {self.num_ranks}")
        if self.slots_per_rank < 1:
            raise ValueError(f"slots_per_rank must be at least 1, got {self.slots_per_rank}")
        if not self.logical_to_physical:
            raise ValueError("a placement needs at least one expert")
        used = set(self.logical_to_physical)
        if len(used) != len(self.logical_to_physical):
            raise ValueError("two logical experts share one physical slot")
        if min(used) < 0 or max(used) >= self.num_physical:
            raise ValueError(f"physical ids must lie in 0 .. {self.num_physical - 1}")
        for physical in used:
            if physical % self.slots_per_rank and physical - 1 not in used:
                raise ValueError(f"slot before physical expert {physical} is empty")

    @classmethod
    def trivial(cls, num_experts: int, num_ranks: int) -> "Placement":
        """Consecutive experts to consecutive ranks, counts differing by at most one.

        ValueError when either number is below 1.
        """
        if num_experts < 1 or num_ranks < 1:
            raise ValueError(f"cannot place {num_experts} experts on {num_ranks} ranks")
        slots = -(-num_experts // num_ranks)
        fewest, num_fuller = divmod(num_experts, num_ranks)
        physical = [
            rank * slots + slot
            for rank in range(num_ranks)
            for slot in range(fewest + (rank < num_fuller))
        ]
        return cls(num_ranks=num_ranks, slots_per_rank=slots, logical_to_physical=tuple(physical))

    @property
    def num_experts(self) -> int:
        """Logical experts."""
        return len(self.logical_to_physical)

    @property
    def num_physical(self) -> int:
        """Slots of the whole group, empty ones included."""
        return self.num_ranks * self.slots_per_rank

    def local_experts(self, rank: int) -> tuple[int, ...]:
        """Logical ids of the experts that `rank` holds, in slot order; may be empty."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not in 0 .. {self.num_ranks - 1}")
        mine = [
            (physical, logical)
            for logical, physical in enumerate(self.logical_to_physical)
            if physical // self.slots_per_rank == rank
        ]
        return tuple(logical for _, logical in sorted(mine))
