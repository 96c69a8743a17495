"""What a step and its kernels cannot be faster than, at the rate of a large copy and the FLOPs of
the data sheet: `bench.step_operations` by `bench.step_kernels`."""

from collections.abc import Iterable
from dataclasses import dataclass

from bench.step_kernels import PURPOSE_OF_OPERATION, Names, operations_of
from bench.step_operations import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """Microseconds; None where a floor makes no sense: for what is no operation of the step."""

    operations: tuple[Operation, ...]
    bytes_per_second: float

    def of_kernel(self, name: str, count: int) -> tuple[Names, float | None]:
        """What `count` launches of it compute, and their floor."""
        names = operations_of(name, count, self.operations)
        return names, self._sum(each for each in self.operations if each.name in names)

    def of_purpose(self, purpose: str) -> float | None:
        """Of all operations that are for it, whichever kernels compute them."""
        return self._sum(
            each for each in self.operations if PURPOSE_OF_OPERATION[each.name] == purpose
        )

    @property
    def of_step(self) -> float:
        """Of one operation behind the other."""
        return self._sum(self.operations) or 0.0

    @property
    def of_memory(self) -> float:
        """If memory were all: of the weights of experts that get rows, all others, and latents."""
        num_bytes = sum(each.count * each.memory_bytes for each in self.operations)
        return 1e6 * num_bytes / self.bytes_per_second

    def _sum(self, operations: Iterable[Operation]) -> float | None:
        floors = [each.floor_microseconds(self.bytes_per_second) for each in operations]
        return sum(floors) if floors else None
