"""Triton path of the gate from its logits on: choice, weights, replica and counts, one kernel:
what `gate`, `choose_replica` and `count_experts` do one after the other.

A program a token: its scores stay in the registers of one warp. Of equal choices the expert with
the smaller id comes first.
"""

import torch
import triton
import triton.language as tl

from kernels.build.dependent_launch_triton import dependent, follow

FEW_TOKENS = 512  # of which less than four programs share a multiprocessor


@triton.jit
def _two_best(best, second, other, second_other):
    """Of two sets of values, each with its best two."""
    rest = tl.maximum(tl.minimum(best, other), tl.maximum(second, second_other))
    return tl.maximum(best, other), rest


@triton.jit
def _gate(
    logits, bias, physical, num_replicas, counts, is_row, topk_idx, topk_physical, topk_weights,
    num_experts, num_groups, num_choices, max_replicas, first, scaling,
    group_size: tl.constexpr, padded_groups: tl.constexpr, padded_size: tl.constexpr,
    groups_per_token: tl.constexpr, experts_per_token: tl.constexpr, padded_choices: tl.constexpr,
    norm_topk: tl.constexpr, drops_groups: tl.constexpr, places: tl.constexpr,
    few: tl.constexpr, counted: tl.constexpr, padded: tl.constexpr, dependent: tl.constexpr,
):  # fmt: skip
    follow(dependent)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, padded_groups)
    member = tl.arange(0, padded_size)
    expert = group[:, None] * group_size + member[None, :]
    real = (group < num_groups)[:, None] & (member < group_size)[None, :]
    logit = tl.load(logits + token * num_experts + expert, mask=real, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logit))
    choice = score + tl.load(bias + expert, mask=real, other=0.0)
    choice = tl.where(real, choice, float("-inf"))
    if places and few:
        # All tables of replicas are looked at, while logits are waited for: those of the chosen
        # are in the first-level cache when it is known who they are. Of many tokens instructions
        # are what takes time, and other programs have brought them there.
        replicas = tl.load(num_replicas + expert, mask=real, other=1)
        first_slot = tl.load(physical + expert * max_replicas, mask=real, other=0)
        choice = tl.where((replicas >= 0) & (first_slot >= -1), choice, float("-inf"))  # always
    if drops_groups:
        nothing = tl.full([padded_groups, padded_size], float("-inf"), tl.float32)
        best, second = tl.reduce((choice, nothing), 1, _two_best)
        if group_size == 1:
            second = tl.zeros_like(best)
        rating = tl.where(group < num_groups, best + second, float("-inf"))
        # A group's place: how many groups are rated higher, or as high and come before.
        other = tl.arange(0, padded_groups)
        ahead = rating[None, :] > rating[:, None]
        ahead |= (rating[None, :] == rating[:, None]) & (other[None, :] < group[:, None])
        kept = tl.sum(ahead.to(tl.int32), axis=1) < groups_per_token
        choice = tl.where(kept[:, None], choice, float("-inf"))

    # As integers of the same order: their maximum over a warp is one instruction. None is -0.0,
    # which is no sum with a score.
    bits = choice.to(tl.int32, bitcast=True)
    key = tl.reshape(bits ^ ((bits >> 31) & 0x7FFFFFFF), [padded_groups * padded_size])
    position = tl.arange(0, padded_groups * padded_size)
    slot = tl.arange(0, padded_choices)
    chosen = tl.zeros([padded_choices], tl.int64)
    # A loop at run time: code of a kernel that runs once a layer is fetched each time.
    for k in range(num_choices):
        best_key = tl.max(key, axis=0)
        winner = tl.min(tl.where(key == best_key, position, padded_groups * padded_size), axis=0)
        logical = winner // padded_size * group_size + winner % padded_size
        logical = tl.minimum(logical, num_experts - 1)  # of what is no number, padding may win
        chosen = tl.where(slot == k, logical.to(tl.int64), chosen)
        key = tl.where(position == winner, -0x7FFFFFFF, key)
    is_choice = slot < experts_per_token
    goes = is_choice
    if padded:
        goes = is_choice & (tl.load(is_row + token + tl.zeros_like(slot)) != 0)
    if counted:
        # It orders nothing else: a barrier of all memory would take longer than the choice. Not at
        # the end, where the programs of many tokens would all wait for each other.
        one = tl.full([padded_choices], 1, tl.int64)
        tl.atomic_add(counts + chosen, one, mask=goes, sem="relaxed")
    logit = tl.load(logits + token * num_experts + chosen, mask=is_choice, other=0.0)
    weight = tl.where(is_choice, 1.0 / (1.0 + tl.exp(-logit)), 0.0)
    if norm_topk:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    place = token * experts_per_token + slot
    weight = (weight * scaling).to(tl.float32)
    if padded:
        weight = tl.where(goes, weight, 0.0)
    tl.store(topk_idx + place, chosen, mask=is_choice)
    tl.store(topk_weights + place, weight, mask=is_choice)
    if places:
        replicas = tl.load(num_replicas + chosen, mask=is_choice, other=1).to(tl.int32)
        # Whatever the tables hold, what is read next is one of their entries.
        replicas = tl.minimum(tl.maximum(replicas, 1), max_replicas)
        turn = (first + token.to(tl.int32) + slot) % replicas
        slot_of = tl.load(physical + chosen * max_replicas + turn, mask=is_choice, other=0)
        tl.store(topk_physical + place, tl.where(goes, slot_of, -1), mask=is_choice)


def launch(
    logits: torch.Tensor,  # [T, E] float32
    bias: torch.Tensor,  # [E] float32
    *,
    num_groups: int,
    groups_per_token: int,
    experts_per_token: int,
    norm_topk: bool,
    scaling: float,
    physical: torch.Tensor | None = None,  # [E, R] int64
    num_replicas: torch.Tensor | None = None,  # [E] int64
    counts: torch.Tensor | None = None,  # [E] int64, added to
    first: int = 0,
    is_row: torch.Tensor | None = None,  # [T] bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """topk_idx, physical (topk_idx itself without a placement) [T, K] int64, topk_weights [T, K]
    float32. Of tokens that are none by `is_row` the physical ones are -1 and the weights 0."""
    num_tokens, num_experts = logits.shape
    group_size = num_experts // num_groups
    shape = (num_tokens, experts_per_token)
    topk_idx = torch.empty(shape, dtype=torch.int64, device=logits.device)
    topk_physical = topk_idx if physical is None else torch.empty_like(topk_idx)
    topk_weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    is_dependent = dependent(logits)
    if num_tokens:
        _gate[(num_tokens,)](
            logits.contiguous(), bias, physical, num_replicas, counts,
            is_row, topk_idx, topk_physical,
            topk_weights, num_experts, num_groups, experts_per_token,
            1 if physical is None else physical.shape[1], first, scaling,
            group_size=group_size, padded_groups=triton.next_power_of_2(num_groups),
            padded_size=triton.next_power_of_2(group_size), groups_per_token=groups_per_token,
            experts_per_token=experts_per_token,
            padded_choices=triton.next_power_of_2(experts_per_token), norm_topk=norm_topk,
            drops_groups=groups_per_token < num_groups, places=physical is not None,
            few=num_tokens <= FEW_TOKENS, counted=counts is not None, padded=is_row is not None,
            dependent=is_dependent, num_warps=1, launch_pdl=is_dependent,
        )  # fmt: skip
    return topk_idx, topk_physical, topk_weights
