"""The `noaux_tc` gate: which experts a token goes to, and with what weight.

score[t, e]   = sigmoid(hidden[t] . weight[e])
choice[t, e]  = score[t, e] + bias[e]               the bias steers the choice only
a group's rating is the sum of its two best choices; the experts of the `groups_per_token`
best groups compete, and the `experts_per_token` best of them are chosen
out weight    = score of the chosen, divided by their sum if `norm_topk`, times `scaling`

hidden   [T, H]  float32 or bfloat16
weight   [E, H]  float32, or the dtype of hidden;  bias [E] float32
returns  topk_idx [T, K] int64 logical experts, best choice first; topk_weights [T, K] float32

The logits are those of `router_gemm` where hidden and weight are of one dtype that is not
float32, else of a float32 product. `route` is the gate with all that is done with its choice. The
Triton path makes the same choice from the same logits; of equal ones, the smaller id.
"""

from typing import Any

import torch

from kernels.build.operands import FLOATS, check_contiguous, check_ids, check_operand
from kernels.build.paths import path_of
from kernels.gemm.linear import linear
from kernels.gemm.router_gemm import router_gemm
from kernels.moe.choose_replica import check_replicas, choose_replica


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
    """Raises ValueError for arguments that do not fit."""
    _check(hidden, weight, bias, num_groups, groups_per_token, experts_per_token)
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

    `rule` as for `gate`; the others as for `choose_replica` and `count_experts`.
    Of tokens that are none by `is_row` [T] bool the experts are -1, the weights 0, and nothing is
    counted. Nothing waits for the host on a GPU, where tables are not read by it: numbers of
    replicas that no table has room for count as the nearest. Raises ValueError for arguments that
    do not fit.
    """
    _check_tables(hidden, len(weight), physical, num_replicas, counts, is_row)
    if first < 0:
        raise ValueError(f"the first replica is {first}")
    if path_of("gate", hidden.device) == "triton":
        from kernels.moe.gate_triton import launch

        sizes = ("num_groups", "groups_per_token", "experts_per_token")
        _check(hidden, weight, bias, *(rule[size] for size in sizes))
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


def count_experts(topk_idx: torch.Tensor, counts: torch.Tensor) -> None:
    """counts [E] int64 of logical experts += how often each is in topk_idx [T, K] int64. Raises
    ValueError for arguments that do not fit, and on a CPU for ids that are no experts."""
    check_operand("topk_idx", topk_idx, counts.device, torch.int64)
    check_operand("counts", counts, counts.device, torch.int64, shape=(counts.numel(),))
    check_ids("topk_idx", topk_idx, 0, len(counts))
    chosen = topk_idx.reshape(-1)
    # Not bincount: on a GPU that reads its input's maximum back.
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))


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


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    num_groups: int,
    groups_per_token: int,
    experts_per_token: int,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} does not fit {tuple(weight.shape)}")
    num_experts, device = len(weight), hidden.device
    check_operand("hidden", hidden, device, *FLOATS)
    check_operand("weight", weight, device, torch.float32, hidden.dtype)
    check_operand("bias", bias, device, torch.float32, shape=(num_experts,))
    check_contiguous(bias=bias)
    if num_groups < 1 or num_experts % num_groups or not 0 < groups_per_token <= num_groups:
        raise ValueError(f"{groups_per_token} of {num_groups} groups of {num_experts} experts")
    if not 0 < experts_per_token <= num_experts // num_groups * groups_per_token:
        raise ValueError(f"{experts_per_token} of {num_experts} experts in {num_groups} groups")


def _check_tables(
    hidden: torch.Tensor,
    num_experts: int,
    physical: torch.Tensor,
    num_replicas: torch.Tensor,
    counts: torch.Tensor,
    is_row: torch.Tensor | None,
) -> None:
    device = hidden.device
    check_replicas(physical, num_replicas, device)
    if len(physical) != num_experts:
        raise ValueError(f"physical {tuple(physical.shape)} is not of {num_experts} experts")
    check_operand("counts", counts, device, torch.int64, shape=(num_experts,))
    check_contiguous(counts=counts)
    if is_row is not None:
        check_operand("is_row", is_row, device, torch.bool, shape=hidden.shape[:1])
        check_contiguous(is_row=is_row)
