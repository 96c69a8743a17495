import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.moe.choose_replica import choose_replica
from kernels.moe.gate import count_experts


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(0, 50),
    num_experts=st.integers(1, 12),
    num_choices=st.integers(1, 4),
    max_replicas=st.integers(1, 5),
    first=st.integers(0, 100),
)
def test_every_choice_goes_to_a_replica_of_its_expert(
    seed: int, num_tokens: int, num_experts: int, num_choices: int, max_replicas: int, first: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, num_choices)
    topk_idx = torch.randint(num_experts, shape, generator=generator)
    num_replicas = torch.randint(1, max_replicas + 1, (num_experts,), generator=generator)
    physical = torch.randperm(num_experts * max_replicas, generator=generator)
    physical = physical.view(num_experts, max_replicas)
    out = choose_replica(topk_idx, physical, num_replicas, first)
    assert (out.shape, out.dtype) == (shape, torch.int64)
    for token in range(num_tokens):
        for choice in range(num_choices):
            expert = int(topk_idx[token, choice])
            replica = (token + choice + first) % int(num_replicas[expert])
            assert out[token, choice] == physical[expert, replica]


def test_replicas_share_evenly_however_small_the_batches() -> None:
    """1,000 batches of a token on one rank each, and one batch of 1,000 tokens."""
    physical, num_replicas = torch.arange(4).view(1, 4), torch.tensor([4])
    large = choose_replica(torch.zeros(1000, 1, dtype=torch.int64), physical, num_replicas, 7)
    assert large.view(-1).bincount().tolist() == [250] * 4
    one = torch.zeros(1, 1, dtype=torch.int64)
    small = [choose_replica(one, physical, num_replicas, rank) for rank in range(1000)]
    assert torch.cat(small).view(-1).bincount().tolist() == [250] * 4


def test_counts_add_up_over_batches() -> None:
    counts = torch.tensor([5, 0, 0, 0])
    place = counts.data_ptr()
    count_experts(torch.tensor([[1, 3], [3, 0]]), counts)
    count_experts(torch.zeros(0, 2, dtype=torch.int64), counts)
    count_experts(torch.tensor([[3, 3]]), counts)
    assert counts.tolist() == [6, 1, 0, 4]
    assert counts.data_ptr() == place
