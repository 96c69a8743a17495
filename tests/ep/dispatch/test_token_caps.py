"""Caps, and steps past them: sub-steps that all ranks agree on, and nothing else changed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.dispatch.collective import CollectiveDispatcher
from ep.dispatch.expert_shard import ExpertShard
from ep.dispatch.split_dispatch import in_sub_steps
from ep.dispatch.token_caps import decode_cap, sub_steps
from ep.group.group import EpGroup
from ep.placement.placement import Placement
from tests.ep.rank_programs import through
from tests.ep.routing import Routing, route
from tests.ep.thread_ranks import Meeting, on_all_ranks

NUM_EXPERTS, NUM_CHOICES, WIDTH = 10, 3, 64


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 200), min_size=1, max_size=8).map(tuple),
    cap=st.integers(1, 70),
)
def test_sub_steps_take_every_token_once_and_no_more_than_the_cap(
    tokens: tuple[int, ...], cap: int
) -> None:
    steps = sub_steps(tokens, cap)
    assert len(steps) == max(1, -(-max(tokens) // cap))
    for rank, num_tokens in enumerate(tokens):
        taken = [list(range(num_tokens))[by_rank[rank]] for by_rank in steps]
        assert [token for part in taken for token in part] == list(range(num_tokens))
        assert max(map(len, taken)) <= cap
        assert max(map(len, taken)) - min(map(len, taken)) <= 1


def test_sub_steps_need_a_cap() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        sub_steps((3, 4), 0)


def test_the_cap_is_that_of_a_full_batch_in_whole_tiles() -> None:
    assert decode_cap(64, 8) == 64
    assert decode_cap(65, 8) == 80
    assert decode_cap(64, 2) == 64
    assert decode_cap(65, 2) == 128
    assert decode_cap(1, 32) == 4
    for num_ranks in (1, 2, 3, 8, 24, 144):
        cap = decode_cap(100, num_ranks)
        assert cap >= 100
        assert cap * num_ranks % 128 == cap % 4 == 0
    with pytest.raises(ValueError, match="no batch"):
        decode_cap(0, 8)


@pytest.mark.parametrize("cap", [1, 4, 7, 64])
@pytest.mark.parametrize("tokens", [(9, 0, 20, 1), (0, 0, 0, 0), (8, 8, 8, 8)])
def test_steps_past_the_cap_give_the_same_bits(tokens: tuple[int, ...], cap: int) -> None:
    """Four ranks and one alone, in sub-steps or at once."""
    placement = Placement.trivial(1, NUM_EXPERTS, 4, 2)
    sizes: list[tuple[int, ...]] = []

    def program(group: EpGroup, _: Meeting) -> torch.Tensor:
        routing = route(
            group.rank, "random", tokens[group.rank], NUM_EXPERTS, NUM_CHOICES, WIDTH, torch.float32
        )
        dispatcher = CollectiveDispatcher(group, placement.slots_per_rank)
        shard = ExpertShard.build(placement, group.rank, dispatcher, "cpu")
        alone = ExpertShard.alone(1, NUM_EXPERTS)

        def part(numbers: torch.Tensor) -> Routing:
            rows = numbers[:, 0].long()
            return Routing(routing.hidden[rows], routing.topk_idx[rows], routing.topk_weights[rows])

        def together(numbers: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
            if group.rank == 0:
                sizes.append(lengths)
            return through(part(numbers), shard, lengths)

        numbers = torch.arange(tokens[group.rank], dtype=torch.float32)[:, None]
        split = in_sub_steps(together, numbers, tokens, rank=group.rank, cap=cap)
        own = (tokens[group.rank],)
        alone_split = in_sub_steps(
            lambda numbers, lengths: through(part(numbers), alone, lengths),
            numbers, own, rank=0, cap=cap,
        )  # fmt: skip
        whole = through(routing, alone, own)
        assert torch.equal(alone_split, whole)
        return (split - whole).abs().sum()

    assert on_all_ranks(4, program) == [0.0] * 4
    assert len(sizes) == max(1, -(-max(tokens) // cap))
    assert max(max(lengths) for lengths in sizes) <= cap
