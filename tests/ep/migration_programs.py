"""What ranks run to see experts move: every slot of the model is filled with its expert's mark."""

import random
import threading
import time
from collections.abc import Iterator

import torch

from core.errors import TransferError
from ep.dispatch.expert_shard import ExpertShard, make_dispatcher
from ep.group.group import EpGroup
from ep.migration import migration as migration_module
from ep.migration.migration import Ended, ExpertMigration
from ep.migration.migration_staging import Carrier
from ep.migration.migration_state import Report
from ep.placement.expert_slots import ExpertSlots
from ep.placement.placement import EMPTY, Placement

NUM_LAYERS, NUM_EXPERTS = 4, 10
PATIENCE_SECONDS = 40
# In which every rank gives up a round that one of them does not come to.
GIVEN_UP_SECONDS = 10


def mark(layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert's weights: [24, 10] as kept transposed, and a vector, longer in later layers."""
    matrix = torch.arange(240, dtype=torch.float32).view(24, 10) + 1000 * expert + 50_000 * layer
    return matrix, torch.full((7 + layer,), 100 * layer + expert, dtype=torch.bfloat16)


def random_placement(rng: random.Random, num_ranks: int) -> Placement:
    slots = -(-NUM_EXPERTS // num_ranks)
    layers = []
    for _ in range(NUM_LAYERS):
        rest = num_ranks * slots - NUM_EXPERTS
        experts = [*range(NUM_EXPERTS), *(rng.randrange(EMPTY, NUM_EXPERTS) for _ in range(rest))]
        rng.shuffle(experts)
        layers.append(tuple(experts))
    return Placement(
        num_ranks=num_ranks,
        slots_per_rank=slots,
        num_logical=NUM_EXPERTS,
        physical_to_logical=tuple(layers),
    )


class Rank:
    """A rank without a model."""

    def __init__(self, group: EpGroup, start: Placement) -> None:
        self.group = group
        dispatcher = make_dispatcher(group, start.slots_per_rank)
        self.shard = ExpertShard.build(start, group.rank, dispatcher, "cpu")
        self.weights = []
        for layer in range(NUM_LAYERS):
            matrices = torch.zeros(start.slots_per_rank, 10, 24).transpose(1, 2)
            vectors = torch.zeros(start.slots_per_rank, 7 + layer, dtype=torch.bfloat16)
            for slot, expert in enumerate(start.local_experts(layer, group.rank)):
                if expert != EMPTY:
                    matrices[slot], vectors[slot] = mark(layer, expert)
            self.weights.append((matrices, vectors))
        self.num_read = 0
        self.migration = ExpertMigration(
            group,
            self.shard,
            [ExpertSlots(tensors) for tensors in self.weights],
            self.read,
            bytes_per_second=1e9,
        )

    def read(self, layer: int, expert: int, row: torch.Tensor) -> None:
        self.num_read += 1
        matrix, vector = mark(layer, expert)
        ExpertSlots([matrix.t().contiguous().t()[None], vector[None]]).read(0, row)

    def step(self) -> Ended | None:
        """An exchange, and a look at what a forward pass would see."""
        facts = self.group.exchange([*map(int, self.migration.report)])
        ended = self.migration.at_boundary([Report(num, bool(bad)) for num, bad in facts])
        self.check()
        time.sleep(0.0005)
        return ended

    def check(self) -> None:
        """Every place that the maps lead to on this rank holds the expert."""
        slots = self.shard.placement.slots_per_rank
        physical = self.shard.maps.physical
        for layer, (matrices, vectors) in enumerate(self.weights):
            for expert in range(NUM_EXPERTS):
                for place in set(physical[layer, expert].tolist()):
                    if place // slots == self.group.rank:
                        matrix, vector = mark(layer, expert)
                        assert torch.equal(matrices[place % slots], matrix), (layer, expert)
                        assert torch.equal(vectors[place % slots], vector), (layer, expert)

    def steps(self) -> Iterator[Ended | None]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            assert time.monotonic() < deadline, self.migration.progress
            yield self.step()

    def move(self, target: Placement) -> Ended:
        self.migration.begin(target)
        return next(ended for ended in self.steps() if ended is not None)


def moved_in_a_row(group: EpGroup, seed: int, num_migrations: int) -> tuple[object, ...]:
    rng = random.Random(seed)  # in step on all ranks
    rank = Rank(group, random_placement(rng, group.size))
    outcomes = []
    for _ in range(num_migrations):
        target = random_placement(rng, group.size)
        outcomes.append(rank.move(target).outcome.value)
        assert rank.migration.placement == target
    return (*outcomes, rank.migration.version, rank.num_read)


def failed_transfer(group: EpGroup, seed: int, layers_before: int) -> tuple[object, ...]:
    """The last rank breaks down when so many layers have been carried."""
    rng = random.Random(seed)
    start = random_placement(rng, group.size)
    rank = Rank(group, start)
    name = "DeviceCarrier" if group.uses_torch else "SocketCarrier"
    carrier = getattr(migration_module, name)
    if group.rank == group.size - 1:
        setattr(migration_module, name, breaking_carrier(carrier, layers_before))
    try:
        ended = rank.move(random_placement(rng, group.size))
    finally:
        setattr(migration_module, name, carrier)
    assert rank.migration.placement == start
    read = rank.num_read
    # The group goes on as if nothing had happened, and can be asked again.
    target = random_placement(rng, group.size)
    again = rank.move(target)
    assert rank.migration.placement == target
    version = rank.migration.version
    return ended.outcome.value, again.outcome.value, version, bool(read), ended.reason, is_left()


def breaking_carrier(carrier: type[Carrier], num_good_rounds: int) -> type[Carrier]:
    class Breaking(carrier):  # type: ignore[misc, valid-type]
        num_rounds = 0

        def carry(self, sends: object, receives: object) -> None:
            if self.num_rounds == num_good_rounds:
                raise TransferError("the cable was cut")
            self.num_rounds += 1
            super().carry(sends, receives)

    return Breaking


def is_left() -> bool:
    """Whether a thread still waits for others, who may have given up."""
    deadline = time.monotonic() + GIVEN_UP_SECONDS
    while any(thread.name == "expert-staging" for thread in threading.enumerate()):
        if time.monotonic() >= deadline:
            return True
        time.sleep(0.05)
    return False
