"""Random tokens, where they are routed, and what comes out, computed the slow way."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routing:
    """hidden [T, H], topk_idx [T, K] logical experts, topk_weights [T, K] float32."""

    hidden: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def route(
    seed: int,
    how: str,
    num_tokens: int,
    num_experts: int,
    num_choices: int,
    width: int,
    dtype: torch.dtype,
) -> Routing:
    """`how`: "random" (distinct experts), "one expert" (always 0), "one rank" (the first few)."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    topk_idx = scores.argsort(1)[:, :num_choices].contiguous()
    if how == "one expert":
        topk_idx = torch.zeros_like(topk_idx)
    elif how == "one rank":
        topk_idx = topk_idx % max(1, num_experts // 4)
    return Routing(
        hidden=torch.randn(num_tokens, width, generator=generator).to(dtype),
        topk_idx=topk_idx,
        topk_weights=torch.rand(num_tokens, num_choices, generator=generator),
    )


def expert(logical: int, x: torch.Tensor) -> torch.Tensor:
    """[n, H] -> [n, H]; element by element, so that bits do not depend on the batch."""
    return (x * (0.5 + 0.25 * logical) + 0.1 * logical).clamp(-2, 2)


def dense_sum(routing: Routing) -> torch.Tensor:
    """[T, H] float32: every expert on every token, weighted by how often it was chosen."""
    total = torch.zeros(routing.hidden.shape)
    for logical in range(int(routing.topk_idx.max()) + 1 if routing.topk_idx.numel() else 0):
        chosen = (routing.topk_idx == logical).float()
        weight = (chosen * routing.topk_weights).sum(1, keepdim=True)
        total += weight * expert(logical, routing.hidden).float()
    return total
