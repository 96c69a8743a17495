import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.placement.placement import EMPTY, Placement
from ep.placement.placement_maps import PlacementMaps, arrays

COUNTS = st.integers(1, 300)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any placement: replicas and empty slots anywhere, another order in each layer."""
    num_logical = draw(st.integers(1, 12))
    num_ranks, num_layers = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    slots = draw(st.integers(-(-num_logical // num_ranks), 14))
    spare = num_ranks * slots - num_logical
    layers = []
    for _ in range(num_layers):
        more = draw(st.lists(st.integers(EMPTY, num_logical - 1), min_size=spare, max_size=spare))
        layers.append(tuple(draw(st.permutations([*range(num_logical), *more]))))
    return Placement(
        num_ranks=num_ranks,
        slots_per_rank=slots,
        num_logical=num_logical,
        physical_to_logical=tuple(layers),
    )


@settings(deadline=None)
@given(num_logical=COUNTS, num_ranks=st.integers(1, 40), num_redundant=st.integers(0, 50))
def test_trivial_placement_is_complete_and_even(
    num_logical: int, num_ranks: int, num_redundant: int
) -> None:
    placement = Placement.trivial(2, num_logical, num_ranks, num_redundant)
    held = [placement.local_experts(1, rank) for rank in range(num_ranks)]
    dealt = [expert for rank in held for expert in rank if expert != EMPTY]
    assert dealt == [i % num_logical for i in range(num_logical + num_redundant)]
    counts = [len(rank) - rank.count(EMPTY) for rank in held]
    assert max(counts) - min(counts) <= 1
    assert max(counts) == placement.slots_per_rank
    assert {len(rank) for rank in held} == {placement.slots_per_rank}


@given(placement=placements())
def test_replicas_are_where_the_slots_say(placement: Placement) -> None:
    for layer in range(placement.num_layers):
        found: dict[int, int] = {}
        for logical in range(placement.num_logical):
            replicas = placement.replicas(layer, logical)
            assert 1 <= len(replicas) <= placement.max_replicas
            assert list(replicas) == sorted(replicas)
            found |= dict.fromkeys(replicas, logical)
        slots = placement.physical_to_logical[layer]
        assert found == {i: expert for i, expert in enumerate(slots) if expert != EMPTY}
        for rank in range(placement.num_ranks):
            begin = rank * placement.slots_per_rank
            local = placement.local_experts(layer, rank)
            assert local == slots[begin : begin + placement.slots_per_rank]


@given(placement=placements())
def test_a_dump_reads_back(placement: Placement) -> None:
    text = placement.as_json()
    assert Placement.from_json(text) == placement
    assert json.loads(text)["physical_to_logical"] == [
        list(layer) for layer in placement.physical_to_logical
    ]


@given(placement=placements())
def test_maps_name_the_replicas(placement: Placement) -> None:
    physical, num_replicas = arrays(placement, range(placement.num_layers))
    for layer in range(placement.num_layers):
        for logical in range(placement.num_logical):
            count = num_replicas[layer, logical]
            row = physical[layer, logical].tolist()
            assert tuple(row[:count]) == placement.replicas(layer, logical)
            assert set(row) == set(row[:count])


def test_maps_are_rewritten_in_place() -> None:
    before = Placement.trivial(3, 4, 2, num_redundant=2)
    maps = PlacementMaps.build(before, "cpu")
    layer = maps.layer(1)
    where = (maps.physical.data_ptr(), maps.num_replicas.data_ptr())
    after = before.with_layers({1: (3, 3, 3, 0, 1, 2), 2: (0, 1, 2, 3, 3, 3)})
    maps.write(after, [1])
    assert (maps.physical.data_ptr(), maps.num_replicas.data_ptr()) == where
    assert layer.num_replicas.tolist() == [1, 1, 1, 3]
    assert layer.physical[:, 0].tolist() == [3, 4, 5, 0]
    assert maps.num_replicas[2].tolist() == [2, 2, 1, 1]  # not asked for
    maps.write(after, [2])
    expected = PlacementMaps.build(after, "cpu")
    assert maps.physical.equal(expected.physical)
    assert maps.num_replicas.equal(expected.num_replicas)


@pytest.mark.parametrize(
    ("num_ranks", "slots", "num_logical", "layer", "message"),
    [
        (0, 1, 1, (0,), "num_ranks"),
        (1, 0, 1, (0,), "slots_per_rank"),
        (1, 1, 0, (0,), "num_logical"),
        (2, 2, 2, (0, 1, 0), "layer 1 has 3 slots, not 4"),
        (2, 2, 3, (0, 0, 1, EMPTY), "layer 1 lacks expert 2"),
        (2, 2, 2, (0, 1, 2, 0), "layer 1 names expert 2"),
        (2, 2, 2, (0, 1, -2, 0), "layer 1 names expert -2"),
    ],
)
def test_impossible_placements_are_refused(
    num_ranks: int, slots: int, num_logical: int, layer: tuple[int, ...], message: str
) -> None:
    fine = tuple(i % max(1, num_logical) for i in range(num_ranks * slots))
    with pytest.raises(ValueError, match=message):
        Placement(
            num_ranks=num_ranks,
            slots_per_rank=slots,
            num_logical=num_logical,
            physical_to_logical=(fine, layer),
        )


@pytest.mark.parametrize("numbers", [(1, 0, 1, 0), (1, 1, 0, 0), (-1, 1, 1, 0), (1, 1, 1, -1)])
def test_trivial_needs_experts_and_ranks(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot place"):
        Placement.trivial(*numbers)


@pytest.mark.parametrize("rank", [-1, 2])
def test_unknown_rank(rank: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        Placement.trivial(1, 4, 2).local_experts(0, rank)


def test_layers_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="no MoE layer 2"):
        Placement.trivial(2, 2, 1).with_layers({2: (0, 1)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "gguf"}, "lacks"),
        ({"version": 2}, "version 2"),
        ({"num_ranks": "2"}, "num_ranks .* integer"),
        ({"slots_per_rank": True}, "slots_per_rank .* integer"),
        ({"num_logical": None}, "num_logical .* integer"),
        ({"physical_to_logical": [[0, 1.5]]}, "lists of integers"),
        ({"physical_to_logical": {}}, "lists of integers"),
        ({"physical_to_logical": [[0, 0]]}, "lacks expert 1"),
    ],
)
def test_files_that_are_no_placement(change: dict[str, object], message: str) -> None:
    fields = json.loads(Placement.trivial(1, 2, 2).as_json()) | change
    with pytest.raises(ValueError, match=message):
        Placement.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_texts_that_are_no_placement(text: str) -> None:
    with pytest.raises(ValueError):
        Placement.from_json(text)
