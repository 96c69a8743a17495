import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.placement import Placement

COUNTS = st.integers(1, 300)


@settings(deadline=None)
@given(num_experts=COUNTS, num_ranks=st.integers(1, 40))
def test_trivial_placement_is_complete_and_even(num_experts: int, num_ranks: int) -> None:
    placement = Placement.trivial(num_experts, num_ranks)
    held = [placement.local_experts(rank) for rank in range(num_ranks)]
    assert [expert for rank in held for expert in rank] == list(range(num_experts))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert max(map(len, held)) == placement.slots_per_rank
    for rank, experts in enumerate(held):
        for slot, logical in enumerate(experts):
            physical = placement.logical_to_physical[logical]
            assert physical == rank * placement.slots_per_rank + slot
    assert placement.num_experts == num_experts
    assert placement.num_physical == num_ranks * placement.slots_per_rank


def test_local_experts_follow_slot_order() -> None:
    placement = Placement(num_ranks=2, slots_per_rank=3, logical_to_physical=(4, 1, 3, 0))
    assert placement.local_experts(0) == (3, 1)
    assert placement.local_experts(1) == (2, 0)


@pytest.mark.parametrize(
    ("num_ranks", "slots", "physical", "message"),
    [
        (0, 1, (0,), "num_ranks"),
        (1, 0, (0,), "slots_per_rank"),
        (1, 1, (), "at least one"),
        (2, 2, (0, 0), "share"),
        (2, 2, (0, 4), "physical ids"),
        (2, 2, (0, -1), "physical ids"),
        (2, 2, (0, 3), "empty"),
    ],
)
def test_impossible_placements_are_refused(
    num_ranks: int, slots: int, physical: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(num_ranks=num_ranks, slots_per_rank=slots, logical_to_physical=physical)


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(0, 1), (1, 0), (-1, 2)])
def test_trivial_needs_experts_and_ranks(num_experts: int, num_ranks: int) -> None:
    with pytest.raises(ValueError, match="cannot place"):
        Placement.trivial(num_experts, num_ranks)


@pytest.mark.parametrize("rank", [-1, 2])
def test_unknown_rank(rank: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        Placement.trivial(4, 2).local_experts(rank)
