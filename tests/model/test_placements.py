"""The demo model says the same, bit for bit, wherever its experts are."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import demo_model
from ep.placement.placement import EMPTY, Placement
from model.config import ModelConfig
from tests.ep.rank_pool import RankPool
from tests.model import parallel_programs

FOLDER = Path(demo_model.__file__).parent / "checkpoint"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


def shuffled(placement: Placement, seed: int) -> Placement:
    """Replicas and holes anywhere, the same expert twice on a rank, other slots in each layer."""
    rng = random.Random(seed)
    num_spare = placement.num_physical - placement.num_logical
    layers = {}
    for layer in range(placement.num_layers):
        spare = [rng.randrange(EMPTY, placement.num_logical) for _ in range(num_spare)]
        experts = [*range(placement.num_logical), *spare]
        rng.shuffle(experts)
        layers[layer] = tuple(experts)
    return placement.with_layers(layers)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tokens_and_logits_do_not_depend_on_the_placement(pool: RankPool, num_ranks: int) -> None:
    config = ModelConfig.from_folder(FOLDER)
    shape = (config.num_moe_layers, config.num_experts, num_ranks)
    for placement in (
        Placement.trivial(*shape, num_redundant=num_ranks + 1),
        shuffled(Placement.trivial(*shape, num_redundant=2 * num_ranks), num_ranks),
    ):
        compared = pool.run(
            parallel_programs.compare_with_one_rank, num_ranks, FOLDER, placement.as_json()
        )
        assert compared == [4, 0, 12, 16][:num_ranks]
