"""The plans of all ranks fit together: what one sends is what the other expects."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.dispatch.routes import Routes, plan_routes
from ep.placement.placement import Placement


def plans(topk_idx: np.ndarray, tokens: tuple[int, ...], placement: Placement) -> list[Routes]:
    return [
        plan_routes(
            topk_idx,
            tokens,
            rank=rank,
            slots_per_rank=placement.slots_per_rank,
        )
        for rank in range(placement.num_ranks)
    ]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any).map(tuple),
    num_experts=st.integers(1, 20),
    num_choices=st.integers(1, 6),
)
def test_every_row_reaches_its_expert_and_returns(
    seed: int, tokens: tuple[int, ...], num_experts: int, num_choices: int
) -> None:
    rng = np.random.default_rng(seed)
    placement = Placement.trivial(1, num_experts, len(tokens))
    shape = (len(tokens), max(tokens), num_choices)
    used = [placement.replicas(0, logical)[0] for logical in range(num_experts)]
    physical = np.array(used)[rng.integers(0, num_experts, shape)]
    for rank, count in enumerate(tokens):
        physical[rank, count:] = 10**6  # padding holds anything
    routes = plans(physical, tokens, placement)

    # A row's content is its (owner, token); an expert's work is to add its physical id.
    returned: list[list[tuple[int, int]]] = []
    for rank, route in enumerate(routes):
        experts = np.repeat(np.arange(len(route.expert_counts)), route.expert_counts)
        physical_ids = experts + rank * placement.slots_per_rank
        rows = list(zip(route.gathered_row.tolist(), physical_ids.tolist(), strict=True))
        returned.append([rows[i] for i in route.send_row])
    for owner, route in enumerate(routes):
        received = []
        for rank, other in enumerate(routes):
            start = sum(other.send_rows[:owner])
            part = returned[rank][start : start + other.send_rows[owner]]
            assert len(part) == route.receive_rows[rank]
            received += part
        assert route.row_of.shape == (num_choices, tokens[owner])
        for token in range(tokens[owner]):
            for choice in range(num_choices):
                row = received[route.row_of[choice, token]]
                assert row == (
                    owner * max(tokens) + token,
                    physical[owner, token, choice],
                )


@pytest.mark.parametrize("expert", [-1, 6])
def test_experts_that_do_not_exist(expert: int) -> None:
    placement = Placement.trivial(1, 6, 2)
    topk_idx = np.full((2, 1, 1), expert)
    with pytest.raises(AssertionError):
        plans(topk_idx, (1, 1), placement)
