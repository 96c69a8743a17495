"""Which rank holds which expert, layer by layer.

A physical expert id names a slot of a rank: `physical = rank * slots_per_rank + slot`. Every
rank has the same number of slots in every MoE layer; a slot holds one logical expert (as the
gate names them) or is empty. An expert may have several replicas; their weights are equal.

A placement is dumped to a file as JSON:

    {"format": "epserve-expert-placement", "version": 1, "num_ranks": 2, "slots_per_rank": 3,
     "num_logical": 4, "physical_to_logical": [[0, 1, 2, 3, 0, -1], ...]}
"""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeGuard

EMPTY = -1
FORMAT = "epserve-expert-placement"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Checked when it is made: ValueError for one that no group could serve.

    num_ranks            ranks of the EP group
    slots_per_rank       physical experts a rank, empty slots included
    num_logical          experts of a layer
    physical_to_logical  [MoE layers][num_ranks * slots_per_rank], the expert in each slot, EMPTY
                         where there is none; every expert at least once a layer
    """

    num_ranks: int
    slots_per_rank: int
    num_logical: int
    physical_to_logical: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for name in ("num_ranks", "slots_per_rank", "num_logical"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        everything = set(range(self.num_logical))
        for layer, experts in enumerate(self.physical_to_logical):
            if len(experts) != self.num_physical:
                raise ValueError(f"layer {layer} has {len(experts)} slots, not {self.num_physical}")
            used = set(experts) - {EMPTY}
            if used == everything:
                continue
            unknown = used - everything
            if unknown:
                raise ValueError(
                    f"layer {layer} names expert {min(unknown)}, there are {self.num_logical}"
                )
            raise ValueError(f"layer {layer} lacks expert {min(everything - used)}")

    @classmethod
    def trivial(
        cls, num_layers: int, num_logical: int, num_ranks: int, num_redundant: int = 0
    ) -> "Placement":
        """Consecutive experts to consecutive ranks, counts differing by at most one; after the
        last expert the first `num_redundant` again. ValueError when a number is too small.
        """
        if num_logical < 1 or num_ranks < 1 or num_layers < 0 or num_redundant < 0:
            raise ValueError(
                f"cannot place {num_logical} + {num_redundant} experts of {num_layers} layers on "
                f"{num_ranks} ranks"
            )
        fewest, num_fuller = divmod(num_logical + num_redundant, num_ranks)
        slots = fewest + bool(num_fuller)
        experts: list[int] = []
        dealt = 0
        for rank in range(num_ranks):
            count = fewest + (rank < num_fuller)
            experts += ((dealt + i) % num_logical for i in range(count))
            experts += (EMPTY,) * (slots - count)
            dealt += count
        return cls(
            num_ranks=num_ranks,
            slots_per_rank=slots,
            num_logical=num_logical,
            physical_to_logical=(tuple(experts),) * num_layers,
        )

    @property
    def num_layers(self) -> int:
        """MoE layers; dense ones do not count."""
        return len(self.physical_to_logical)

    @property
    def num_physical(self) -> int:
        """Slots of the whole group in a layer, empty ones included."""
        return self.num_ranks * self.slots_per_rank

    @property
    def max_replicas(self) -> int:
        """More replicas than any expert can have, in this placement or another of its shape."""
        return self.num_physical - self.num_logical + 1

    @property
    def num_empty(self) -> int:
        """Slots of the emptiest layer that hold no expert."""
        return max((experts.count(EMPTY) for experts in self.physical_to_logical), default=0)

    def has_shape_of(self, other: "Placement") -> bool:
        """Whether one can take the place of the other in running ranks."""
        return self._shape == other._shape

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.num_ranks, self.slots_per_rank, self.num_logical, self.num_layers

    def local_experts(self, layer: int, rank: int) -> tuple[int, ...]:
        """[slots_per_rank] experts of `rank` in slot order, EMPTY where there is none."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not in 0 .. {self.num_ranks - 1}")
        begin = rank * self.slots_per_rank
        return self.physical_to_logical[layer][begin : begin + self.slots_per_rank]

    def replicas(self, layer: int, logical: int) -> tuple[int, ...]:
        """Physical ids of an expert, ascending; at least one."""
        return self._replicas[layer][logical]

    @cached_property
    def _replicas(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        layers = []
        for experts in self.physical_to_logical:
            found: list[list[int]] = [[] for _ in range(self.num_logical)]
            for physical, logical in enumerate(experts):
                if logical != EMPTY:
                    found[logical].append(physical)
            layers.append(tuple(map(tuple, found)))
        return tuple(layers)

    def with_layers(self, changed: "dict[int, tuple[int, ...]]") -> "Placement":
        """The same with other slots in some layers: {layer: [num_physical] experts}."""
        unknown = set(changed) - set(range(self.num_layers))
        if unknown:
            raise ValueError(f"there is no MoE layer {min(unknown)}")
        layers = enumerate(self.physical_to_logical)
        return replace(
            self, physical_to_logical=tuple(tuple(changed.get(i, experts)) for i, experts in layers)
        )

    def as_json(self) -> str:
        """The dump format, one layer a line."""
        layers = ",\n".join(f"  {json.dumps(experts)}" for experts in self.physical_to_logical)
        return (
            f'{{"format": "{FORMAT}", "version": {VERSION}, "num_ranks": {self.num_ranks}, '
            f'"slots_per_rank": {self.slots_per_rank}, "num_logical": {self.num_logical},\n'
            f' "physical_to_logical": [\n{layers}\n]}}\n'
        )

    @classmethod
    def from_json(cls, text: str) -> "Placement":
        """The inverse of `as_json`. ValueError, saying why, for anything else."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ValueError(f'no expert placement: it lacks "format": "{FORMAT}"')
        if fields.get("version") != VERSION:
            raise ValueError(f"expert placement of version {fields.get('version')}, not {VERSION}")
        return cls(
            num_ranks=_integer(fields, "num_ranks"),
            slots_per_rank=_integer(fields, "slots_per_rank"),
            num_logical=_integer(fields, "num_logical"),
            physical_to_logical=_layers(fields.get("physical_to_logical")),
        )


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if not _is_integer(value):
        raise ValueError(f"{name} of an expert placement must be an integer, got {value!r}")
    return value


def _layers(value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list) or not all(
        isinstance(layer, list) and all(map(_is_integer, layer)) for layer in value
    ):
        raise ValueError("physical_to_logical of an expert placement must be lists of integers")
    return tuple(map(tuple, value))
