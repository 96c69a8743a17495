"""The `noaux_tc` gate: which experts a token goes to, and with what weight.

score[t, e]   = sigmoid(hidden[t] . weight[e])
choice[t, e]  = score[t, e] + bias[e]               the bias steers the choice only
a group's rating is the sum of its two best choices; the experts of the `groups_per_token`
best groups compete, and the `experts_per_token` best of them are chosen
out weight    = score of the chosen, divided by their sum if `norm_topk`, times `scaling`

hidden   [T, H]  float32 or bfloat16
weight   [E, H]  float32, or the dtype of hidden;  bias [E] float32
returns  topk_idx [T, K] int64 logical experts, best choice first; topk_weights [T, K] float32

The logits are those of `kernels.router_gemm` where hidden and weight are of one dtype that is not
float32, else of a float32 product. `route` is the gate with all that is done with its choice. The
Triton path makes the same choice from the same logits; of equal ones, the smaller id.
"""

from typing import Any

import torch

from kernels.choose_replica import choose_replica
from kernels.count_experts import count_experts
from kernels.linear import linear
from kernels.paths import path_of
from kernels.router_gemm import router_gemm


def gate(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    num_groups: int,
    groups_per_token: int,
    experts_per_token: int,
    norm_topk: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _logits(hidden, weight).sigmoid_()
    choice = scores + bias
    if groups_per_token < num_groups:
        drop_groups(choice.unflatten(1, (num_groups, -1)), groups_per_token)
    topk_idx = choice.topk(experts_per_token, dim=-1).indices
    topk_weights = scores.gather(1, topk_idx)
    if norm_topk:
        topk_weights.div_(topk_weights.sum(dim=-1, keepdim=True).add_(1e-20))
    return topk_idx, topk_weights.mul_(scaling)


def route(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    physical: torch.Tensor,
    num_replicas: torch.Tensor,
    counts: torch.Tensor,
    *,
    first: int,
    is_row: torch.Tensor | None = None,
    **rule: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(physical experts [T, K] int64, weights [T, K] float32), and counts [E] int64 added to.

    `rule` as for `gate`; the others as for `kernels.choose_replica` and `kernels.count_experts`.
    Of tokens that are none by `is_row` [T] bool the experts are -1, the weights 0, and nothing is
    counted. Nothing waits for the host on a GPU.
    """
    if path_of("gate", hidden.device) == "triton":
        from kernels.gate_triton import launch

        _, placed, topk_weights = launch(
            _logits(hidden, weight), bias, physical=physical, num_replicas=num_replicas,
            counts=counts, first=first, is_row=is_row, **rule,
        )  # fmt: skip
        return placed, topk_weights
    topk_idx, topk_weights = gate(hidden, weight, bias, **rule)
    placed = choose_replica(topk_idx, physical, num_replicas, first)
    if is_row is None:
        count_experts(topk_idx, counts)
        return placed, topk_weights
    count_experts(topk_idx[is_row], counts)
    padding = ~is_row.unsqueeze(1)
    return placed.masked_fill(padding, -1), topk_weights.masked_fill(padding, 0.0)


def drop_groups(choice: torch.Tensor, groups_per_token: int) -> None:
    """Sets the experts outside the best groups to -inf; choice [T, groups, experts of a group]."""
    num_best = min(2, choice.shape[2])
    rating = choice.topk(num_best, dim=-1).values.sum(dim=-1)
    kept = rating.topk(groups_per_token, dim=-1).indices
    dropped = torch.ones_like(rating, dtype=torch.bool).scatter_(1, kept, False)
    choice.masked_fill_(dropped.unsqueeze(-1), float("-inf"))


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, E] float32."""
    if weight.dtype != torch.float32 and weight.dtype == hidden.dtype:
        return router_gemm(hidden, weight)
    return linear(hidden.float(), weight)
