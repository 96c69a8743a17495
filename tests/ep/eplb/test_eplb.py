"""Balancing experts: what must hold for any load, and how good it is on loads that are known to be
hard. The judge of quality is a plain greedy packing, written here."""

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.eplb import CLUSTERS, ClusterSizes, compare_full, follow_drift
from bench.ranks.expert_loads import DRIFTING, STATIC, windows
from ep.eplb.balance import balance
from ep.eplb.balancedness import Load, Slots, balancedness, num_replicas, rank_loads
from ep.eplb.local_search import Rules, descend
from ep.eplb.node_refill import groups_of_nodes
from ep.eplb.rank_names import keep_ranks, num_new
from ep.eplb.within_budget import NEAR, choose, rebalance
from ep.migration.migration_moves import keep_in_place, layer_moves
from ep.placement.placement import EMPTY, Placement

NUM_LAYERS = 3


@st.composite
def loads(draw: st.DrawFn, num_experts: int) -> Load:
    """Anything from nothing at all to one expert with everything, with many ties."""
    seed = draw(st.integers(0, 2**32 - 1))
    kind = draw(st.sampled_from(["ties", "skewed", "idle", "one"]))
    rng = np.random.default_rng(seed)
    shape = (NUM_LAYERS, num_experts)
    if kind == "ties":
        return rng.integers(0, 3, shape).astype(np.float64)
    if kind == "skewed":
        return np.floor(rng.lognormal(0, 2.5, shape) * 100)
    load = np.zeros(shape)
    if kind == "one":
        load[:, rng.integers(num_experts)] = 1e6
    return load


@st.composite
def problems(draw: st.DrawFn) -> tuple[Load, ClusterSizes, int]:
    """Load, cluster, groups of experts; some hierarchical, some not."""
    num_nodes = draw(st.sampled_from([1, 1, 2, 3]))
    num_ranks = num_nodes * draw(st.integers(1, 4))
    num_groups = draw(st.sampled_from([1, 2, 6]))
    num_experts = num_groups * draw(st.integers(1, 6))
    fewest = -(-num_experts // num_ranks)
    slots = draw(st.integers(fewest, fewest + 4))
    load = draw(loads(num_experts))
    return (
        load,
        ClusterSizes(num_ranks=num_ranks, slots_per_rank=slots, num_nodes=num_nodes),
        num_groups,
    )


def balanced(load: Load, cluster: ClusterSizes, num_groups: int) -> Slots:
    return balance(
        load,
        num_ranks=cluster.num_ranks,
        slots_per_rank=cluster.slots_per_rank,
        num_nodes=cluster.num_nodes,
        num_groups=num_groups,
    )


def some_slots(
    num_experts: int, num_used: int, cluster: ClusterSizes, rng: np.random.Generator
) -> Slots:
    """Any placement: replicas of any experts, the slots that are not used anywhere."""
    num_physical = cluster.num_ranks * cluster.slots_per_rank
    layers = []
    for _ in range(NUM_LAYERS):
        replicas = rng.integers(0, num_experts, num_used - num_experts)
        empty = [EMPTY] * (num_physical - num_used)
        layers.append(rng.permutation([*range(num_experts), *replicas, *empty]))
    return np.array(layers, dtype=np.int64).reshape(NUM_LAYERS, cluster.num_ranks, -1)


def most_copies(slots: Slots) -> int:
    """Of one expert on one rank."""
    return max(np.unique(rank, return_counts=True)[1].max() for layer in slots for rank in layer)


def num_travelling(old: Slots, new: Slots) -> int:
    """Experts that are carried from rank to rank, as a migration does it."""
    num_slots = old.shape[2]
    count = 0
    for before, after in zip(old.reshape(len(old), -1), new.reshape(len(new), -1), strict=True):
        kept = keep_in_place(before.tolist(), after.tolist(), num_slots)
        count += sum(move.travels for move in layer_moves(before.tolist(), kept, num_slots))
    return count


def placement_of(slots: Slots, num_experts: int) -> Placement:
    """Which checks that every expert is placed."""
    return Placement(
        num_ranks=slots.shape[1],
        slots_per_rank=slots.shape[2],
        num_logical=num_experts,
        physical_to_logical=tuple(map(tuple, slots.reshape(len(slots), -1).tolist())),
    )


@settings(deadline=None, max_examples=30)
@given(problem=problems())
def test_any_load_is_placed_whole_and_alike(problem: tuple[Load, ClusterSizes, int]) -> None:
    load, cluster, num_groups = problem
    num_experts = load.shape[1]
    slots = balanced(load, cluster, num_groups)
    assert slots.shape == (NUM_LAYERS, cluster.num_ranks, cluster.slots_per_rank)
    placement_of(slots, num_experts)
    assert (slots != EMPTY).all()
    assert np.array_equal(slots, balanced(load.copy(), cluster, num_groups))
    hierarchical = cluster.num_nodes > 1 and num_groups % cluster.num_nodes == 0
    if hierarchical:
        _, whole = groups_of_nodes(slots, num_experts, cluster.num_nodes, num_groups)
        assert whole.tolist() == list(range(NUM_LAYERS))
    elif np.array_equal(load, np.ones_like(load)) and cluster.slots_per_rank <= num_experts:
        assert most_copies(slots) == 1


@settings(deadline=None, max_examples=30)
@given(problem=problems(), data=st.data())
def test_a_budget_is_kept_and_nothing_gets_worse(
    problem: tuple[Load, ClusterSizes, int], data: st.DataObject
) -> None:
    load, cluster, num_groups = problem
    num_experts = load.shape[1]
    num_used = data.draw(st.integers(num_experts, cluster.num_ranks * cluster.slots_per_rank))
    slots = some_slots(num_experts, num_used, cluster, np.random.default_rng(num_used))
    budget = data.draw(st.integers(0, 40))
    options = {"num_nodes": cluster.num_nodes, "num_groups": num_groups}
    moved = rebalance(slots, load, max_moves=budget, **options)
    placement_of(moved, num_experts)
    before, after = balancedness(slots, load), balancedness(moved, load)
    assert (after >= before - 1e-9).all()
    assert num_travelling(slots, moved) <= budget
    assert np.array_equal(moved, rebalance(slots, load, max_moves=budget, **options))
    more = balancedness(rebalance(slots, load, max_moves=budget + 40, **options), load)
    assert more.sum() >= after.sum() * 0.98  # a choice of its own, hardly ever worse
    unbounded = balancedness(rebalance(slots, load, **options), load)
    full = balancedness(balanced(load, cluster, num_groups), load)
    assert (unbounded >= np.maximum(full, before) * 0.995 - 1e-9).all()


def greedy(load: list[float], num_ranks: int, slots_per_rank: int) -> float:
    """Balancedness of a plain packing: replicas to what is heaviest, the heaviest item to the
    lightest rank with room."""
    counts = [1] * len(load)
    for _ in range(num_ranks * slots_per_rank - len(load)):
        heaviest = max(range(len(load)), key=lambda e: load[e] / counts[e])
        counts[heaviest] += 1
    items = sorted((load[e] / c for e, c in enumerate(counts) for _ in range(c)), reverse=True)
    ranks = [(0.0, rank, 0) for rank in range(num_ranks)]
    done = []
    for item in items:
        total, rank, used = heapq.heappop(ranks)
        entry = (total + item, rank, used + 1)
        if used + 1 < slots_per_rank:
            heapq.heappush(ranks, entry)
        else:
            done.append(entry[0])
    done += [total for total, _, _ in ranks]
    return sum(done) / num_ranks / max(done)


@pytest.mark.parametrize("name", [*STATIC, *DRIFTING])
def test_at_least_as_even_as_greedy_packing(name: str) -> None:
    _, now = windows(name, 7, 2, 64)
    if not now.any():
        return
    for ranks, slots in ((4, 18), (16, 5), (36, 2)):
        ours = balancedness(balance(now, num_ranks=ranks, slots_per_rank=slots), now)
        for layer, load in enumerate(now.tolist()):
            assert ours[layer] >= greedy(load, ranks, slots) - 1e-5


@pytest.mark.parametrize("name", DRIFTING)
@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_half_the_moves_are_enough_when_load_drifts(name: str, cluster: ClusterSizes) -> None:
    before, now = windows(name, 1, 3, 256)
    drifting = follow_drift(cluster, before, now, 0.5)
    assert drifting.reached >= 0.98
    assert drifting.num_moves <= drifting.full_moves // 2


def test_a_hot_expert_is_replicated_once_a_rank() -> None:
    """The published algorithm gives it five replicas, two of them on one rank."""
    load = np.zeros((1, 16))
    load[0, 5] = 1000
    slots = balance(load, num_ranks=4, slots_per_rank=5)
    assert rank_loads(slots, load).round(3).tolist() == [[250.0] * 4]
    assert num_replicas(slots, 16).max() == 4
    assert most_copies(slots) == 1


def test_replicas_are_spread_where_nothing_is_known() -> None:
    slots = balance(np.zeros((2, 8)), num_ranks=4, slots_per_rank=4)
    assert num_replicas(slots, 8).tolist() == [[2] * 8] * 2
    assert most_copies(slots) == 1
    assert balancedness(slots, np.zeros((2, 8))).tolist() == [1.0, 1.0]


def test_more_slots_than_experts() -> None:
    load = np.array([[3.0, 1.0]])
    slots = balance(load, num_ranks=3, slots_per_rank=5)
    assert most_copies(slots) == 3
    assert balancedness(slots, load)[0] == pytest.approx(1)


def test_each_copy_of_an_expert_on_a_rank_is_a_move() -> None:
    slots = np.array([[[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]])
    load = np.array([[1.0, 1.0]])
    everything = rebalance(slots, load)
    assert most_copies(everything) > 1
    assert int(num_new(slots, everything).sum()) == num_travelling(slots, everything)
    for budget in range(9):
        assert num_travelling(slots, rebalance(slots, load, max_moves=budget)) <= budget


def test_too_few_slots() -> None:
    with pytest.raises(ValueError, match="5 experts in 2 x 2 slots"):
        balance(np.ones((1, 5)), num_ranks=2, slots_per_rank=2)


def test_moves_go_to_the_layer_that_gains_most() -> None:
    """Layer 0 gains .1 for a move, then .3 for 2 more; layer 1 gains .5 for 4."""
    num_moves = np.array([[0, 0], [1, 4], [3, 9]])
    value = np.array([[0.5, 0.4], [0.6, 0.9], [0.9, 0.9]])
    assert choose(num_moves, value, 0).tolist() == [0, 0]
    assert choose(num_moves, value, 2).tolist() == [1, 0]
    assert choose(num_moves, value, 3).tolist() == [2, 0]
    assert choose(num_moves, value, 4).tolist() == [0, 1]
    assert choose(num_moves, value, 7).tolist() == [2, 1]


def test_of_few_layers_the_best_choice_is_found() -> None:
    rng = np.random.default_rng(3)
    moves = np.concatenate((np.zeros((1, 3), dtype=np.int64), rng.integers(0, 60, (5, 3))))
    value = 0.4 + 0.1 * np.sort(rng.random((6, 3)), axis=0)
    for budget in (10, 35, 50, 170):
        choice = choose(moves, value, budget)
        assert moves[choice, range(3)].sum() <= budget
        best = max(
            value[list(other), range(3)].sum()
            for other in itertools.product(range(6), repeat=3)
            if moves[list(other), range(3)].sum() <= budget
        )
        assert value[choice, range(3)].sum() == pytest.approx(best, rel=NEAR)


def test_of_many_layers_each_rank_of_a_layer_trades_once() -> None:
    """What is counted on the way is what comes out."""
    rng = np.random.default_rng(5)
    slots = np.array([rng.permutation(96).reshape(12, 8) for _ in range(20)])
    load = rng.lognormal(0, 1, (20, 96))
    for stage in descend(slots, load, Rules(limit=1, num_steps=6, even=0.999)):
        assert np.array_equal(stage.num_moves, num_new(slots[stage.rows], stage.slots))
        assert np.allclose(stage.balancedness, balancedness(stage.slots, load[stage.rows]))
        assert most_copies(stage.slots) == 1


def test_ranks_and_nodes_are_renamed_to_keep_what_they_have() -> None:
    old = np.arange(16).reshape(1, 4, 4)
    new = old[:, [3, 2, 0, 1]]
    assert num_new(old, new).tolist() == [16]
    assert np.array_equal(keep_ranks(old, new), old)
    assert np.array_equal(keep_ranks(old, new, num_nodes=2), old)
    apart = old[:, [0, 2, 1, 3]]  # ranks 0 and 2 are to be one node
    kept = keep_ranks(old, apart, num_nodes=2)
    assert sorted(kept[0, :2].ravel().tolist()) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert num_new(old, kept).tolist() == [8]


def test_ours_alone_needs_no_published_code() -> None:
    _, now = windows("gamma", 0, 2, 256)
    full = compare_full(CLUSTERS[0], now, None)
    assert full.ours > 0.99
    assert full.theirs is None
