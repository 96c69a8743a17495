"""The `noaux_tc` gate: which experts a token goes to, and with what weight.

score[t, e]   = sigmoid(hidden[t] . weight[e])
choice[t, e]  = score[t, e] + bias[e]               the bias steers the choice only
a group's rating is the sum of its two best choices; the experts of the `groups_per_token`
best groups compete, and the `experts_per_token` best of them are chosen
out weight    = score of the chosen, divided by their sum if `norm_topk`, times `scaling`

hidden   [T, H]  float32 or bfloat16
weight   [E, H]  float32;  bias [E] float32
returns  topk_idx [T, K] int64 logical experts, best choice first; topk_weights [T, K] float32
"""

import torch

from kernels.linear import linear


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
    scores = linear(hidden.float(), weight).sigmoid_()
    choice = scores + bias
    if groups_per_token < num_groups:
        drop_groups(choice.unflatten(1, (num_groups, -1)), groups_per_token)
    topk_idx = choice.topk(experts_per_token, dim=-1).indices
    topk_weights = scores.gather(1, topk_idx)
    if norm_topk:
        topk_weights.div_(topk_weights.sum(dim=-1, keepdim=True).add_(1e-20))
    return topk_idx, topk_weights.mul_(scaling)


def drop_groups(choice: torch.Tensor, groups_per_token: int) -> None:
    """Sets the experts outside the best groups to -inf; choice [T, groups, experts of a group]."""
    num_best = min(2, choice.shape[2])
    rating = choice.topk(num_best, dim=-1).values.sum(dim=-1)
    kept = rating.topk(groups_per_token, dim=-1).indices
    dropped = torch.ones_like(rating, dtype=torch.bool).scatter_(1, kept, False)
    choice.masked_fill_(dropped.unsqueeze(-1), float("-inf"))
