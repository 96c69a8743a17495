"""Experts move between real processes; at each step boundary every map leads to its expert."""

from collections.abc import Iterator

import pytest

from tests.ep.migration_programs import failed_transfer, moved_in_a_row
from tests.ep.rank_pool import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


@pytest.mark.parametrize("backend", ["sockets", "gloo"])
def test_ten_migrations_in_a_row(pool: RankPool, backend: str) -> None:
    results = pool.run(moved_in_a_row, 3, 1, 10, backend=backend)
    assert results == [(*["done"] * 10, 10, 0)] * 3


def test_within_one_rank(pool: RankPool) -> None:
    assert pool.run(moved_in_a_row, 1, 1, 3) == [("done", "done", "done", 3, 0)]


@pytest.mark.parametrize("backend", ["sockets", "gloo"])
@pytest.mark.parametrize("layers_before", [0, 2])
def test_a_failed_transfer_leaves_the_old_placement(
    pool: RankPool, layers_before: int, backend: str
) -> None:
    """With layers changed by then they are read from the checkpoint again. Nobody goes on waiting
    for who has failed."""
    results = pool.run(failed_transfer, 3, 2, layers_before, backend=backend)
    for outcome, again, version, has_read, _, is_left in results:
        assert (outcome, again, version) == ("restored", "done", 1)
        assert has_read == bool(layers_before)
        assert not is_left
    assert any("cable" in reason or "closed" in reason for *_, reason, _ in results)
