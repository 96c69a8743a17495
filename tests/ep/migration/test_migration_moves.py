"""Filling every slot from the moves gives the new placement, and nothing travels needlessly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.migration.migration_moves import Move, keep_in_place, layer_moves, num_bytes_by_pair
from ep.placement.placement import EMPTY


@st.composite
def two_placements(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Old and new slots of a layer, and slots a rank; every expert is in both."""
    num_ranks, slots = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    num_slots = num_ranks * slots
    num_experts = draw(st.integers(1, num_slots))
    both = []
    for _ in range(2):
        filler = st.integers(EMPTY, num_experts - 1)
        rest = draw(st.lists(filler, min_size=num_slots, max_size=num_slots))
        both.append(draw(st.permutations([*range(num_experts), *rest][:num_slots])))
    return both[0], both[1], slots


@settings(max_examples=300, deadline=None)
@given(two_placements())
def test_moves_make_the_new_placement(case: tuple[list[int], list[int], int]) -> None:
    old, new, slots = case
    moves = layer_moves(old, new, slots)
    filled = list(old)
    for move in moves:
        filled[move.rank * slots + move.slot] = old[move.source_rank * slots + move.source_slot]
        held = old[move.rank * slots : (move.rank + 1) * slots]
        assert move.travels == (new[move.rank * slots + move.slot] not in held)
    for got, wanted in zip(filled, new, strict=True):
        assert wanted in (EMPTY, got)
    assert layer_moves(new, new, slots) == ()


@settings(max_examples=300, deadline=None)
@given(two_placements())
def test_what_a_rank_keeps_stays_in_its_slot(case: tuple[list[int], list[int], int]) -> None:
    old, new, slots = case
    kept = keep_in_place(old, new, slots)
    for begin in range(0, len(new), slots):
        part = slice(begin, begin + slots)
        assert sorted(kept[part]) == sorted(new[part])
    same_rank = [move for move in layer_moves(old, kept, slots) if not move.travels]
    # What is left in place moves for a second replica of an expert on the same rank only.
    for move in same_rank:
        expert = kept[move.rank * slots + move.slot]
        assert kept[move.rank * slots : (move.rank + 1) * slots].count(expert) > 1


def test_replicas_share_the_sending() -> None:
    """Experts 0 and 1 are on ranks 0 and 1 both; ranks 2 and 3 want them."""
    old, new = [0, 1, 0, 1, 2, 3, 4, 5], [0, 1, 4, 5, 2, 0, 3, 1]
    sources = [(move.source_rank, move.rank) for move in layer_moves(old, new, 2)]
    assert sources == [(3, 1), (3, 1), (0, 2), (2, 3), (1, 3)]
    assert num_bytes_by_pair(layer_moves(old, new, 2), 10) == {
        (3, 1): 20,
        (0, 2): 10,
        (2, 3): 10,
        (1, 3): 10,
    }


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="expert 2 is nowhere"):
        layer_moves([0, 1], [0, 2], 1)
    with pytest.raises(ValueError, match="do not match"):
        layer_moves([0, 1], [0, 1, 1], 1)
    assert layer_moves([0, 1, 1], [0, 1, EMPTY], 3) == ()
    assert layer_moves([0, 1, EMPTY], [0, 1, 0], 3) == (
        Move(source_rank=0, source_slot=0, rank=0, slot=2),
    )
