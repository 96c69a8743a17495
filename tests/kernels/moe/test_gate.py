import math

import pytest
import torch

from kernels.moe.gate import gate
from tests.kernels.tensors import generator, randn

SHAPES = (
    # experts, groups, groups per token, experts per token
    (8, 1, 1, 3),
    (8, 4, 2, 3),
    (12, 4, 1, 3),
    (16, 4, 4, 4),
    (4, 4, 2, 2),  # groups of one expert
    (64, 8, 4, 8),
)


def one_token(
    scores: list[float], bias: list[float], groups: int, kept_groups: int, count: int
) -> list[int]:
    """The experts of one token, best first, written as the paper tells it."""
    size = len(scores) // groups
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    rating = [
        sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[:2]) for g in range(groups)
    ]
    kept = sorted(range(groups), key=lambda g: -rating[g])[:kept_groups]
    allowed = [e for e in range(len(scores)) if e // size in kept]
    return sorted(allowed, key=lambda e: -choice[e])[:count]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norm_topk", [False, True])
def test_against_one_token_at_a_time(
    request: pytest.FixtureRequest, shape: tuple[int, int, int, int], norm_topk: bool
) -> None:
    rng = generator(request.node.nodeid)
    experts, groups, kept_groups, count = shape
    hidden, weight, bias = randn(rng, 30, 17), randn(rng, experts, 17), randn(rng, experts)
    topk_idx, topk_weights = gate(
        hidden,
        weight,
        bias,
        num_groups=groups,
        groups_per_token=kept_groups,
        experts_per_token=count,
        norm_topk=norm_topk,
        scaling=2.5,
    )
    assert topk_idx.dtype == torch.int64
    assert topk_weights.dtype == torch.float32
    for t in range(30):
        logits = (weight.double() @ hidden[t].double()).tolist()
        scores = [1 / (1 + math.exp(-x)) for x in logits]
        want = one_token(scores, bias.tolist(), groups, kept_groups, count)
        assert topk_idx[t].tolist() == want, t
        total = sum(scores[e] for e in want) if norm_topk else 1.0
        expected = [2.5 * scores[e] / total for e in want]
        assert topk_weights[t].tolist() == pytest.approx(expected, rel=1e-5), t


def test_no_tokens() -> None:
    topk_idx, topk_weights = gate(
        torch.empty(0, 5),
        torch.ones(8, 5),
        torch.zeros(8),
        num_groups=4,
        groups_per_token=2,
        experts_per_token=3,
        norm_topk=True,
        scaling=1.0,
    )
    assert topk_idx.shape == topk_weights.shape == (0, 3)
