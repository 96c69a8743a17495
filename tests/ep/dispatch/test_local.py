import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.dispatch.local import LocalDispatcher
from tests.ep.routing import Routing, dense_sum, expert, route

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
HOW = st.sampled_from(["random", "one expert", "one rank"])


def combined(routing: Routing, num_experts: int) -> torch.Tensor:
    dispatcher = LocalDispatcher(num_experts)
    num_tokens = routing.hidden.shape[0]
    dispatched = dispatcher.dispatch(
        routing.hidden, routing.topk_idx, routing.topk_weights, (num_tokens,)
    )
    counts = dispatched.expert_counts
    assert (counts.dtype, counts.device.type, counts.numel()) == (torch.int64, "cpu", num_experts)
    assert int(counts.sum()) == dispatched.hidden.shape[0] == routing.topk_idx.numel()
    rows = dispatched.hidden.split(counts.tolist())
    out = torch.cat([expert(logical, x) for logical, x in enumerate(rows)])
    return dispatcher.combine(out, dispatched.handle)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    how=HOW,
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(1, 20),
    num_choices=st.integers(1, 8),
    width=st.integers(1, 65),
    dtype=DTYPES,
)
def test_equals_a_dense_loop(
    seed: int,
    how: str,
    num_tokens: int,
    num_experts: int,
    num_choices: int,
    width: int,
    dtype: torch.dtype,
) -> None:
    num_choices = min(num_choices, num_experts)
    routing = route(seed, how, num_tokens, num_experts, num_choices, width, dtype)
    result = combined(routing, num_experts)
    assert (result.shape, result.dtype) == (routing.hidden.shape, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result.float(), dense_sum(routing), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [1, 7, 64, 250])
def test_bits_of_a_token_do_not_depend_on_the_batch(width: int) -> None:
    routing = route(11, "random", 33, 12, 5, width, torch.float32)
    whole = combined(routing, 12)
    for first, last in [(0, 1), (5, 6), (3, 20), (32, 33)]:
        part = Routing(
            routing.hidden[first:last],
            routing.topk_idx[first:last],
            routing.topk_weights[first:last],
        )
        assert torch.equal(combined(part, 12), whole[first:last])


def test_sum_is_in_float32_and_in_order_of_choice() -> None:
    """1 + 2**24 - 2**24 is 0 in float32 in this order, 1 in the reverse; bf16 would lose more."""
    dispatcher = LocalDispatcher(3)
    weights = torch.tensor([[1.0, 2.0**24, -(2.0**24)]])
    ones = torch.ones(1, 4, dtype=torch.bfloat16)
    for choices, expected in [([0, 1, 2], 0.0), ([2, 1, 0], 0.0)]:
        dispatched = dispatcher.dispatch(ones, torch.tensor([choices]), weights, (1,))
        out = dispatcher.combine(dispatched.hidden, dispatched.handle)
        assert out.tolist() == [[expected] * 4]
    dispatched = dispatcher.dispatch(ones, torch.tensor([[0, 1, 2]]), weights.flip(1), (1,))
    assert dispatcher.combine(dispatched.hidden, dispatched.handle).tolist() == [[1.0] * 4]


def test_impossible_calls() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LocalDispatcher(0)
    hidden, weights = torch.zeros(1, 2), torch.ones(1, 1)
    with pytest.raises(AssertionError, match="out of range"):
        LocalDispatcher(4).dispatch(hidden, torch.tensor([[4]]), weights, (1,))
    with pytest.raises(AssertionError):
        LocalDispatcher(4).dispatch(hidden, torch.tensor([[0]]), weights, (2,))
    with pytest.raises(AssertionError):
        LocalDispatcher(4).combine(hidden, object())
