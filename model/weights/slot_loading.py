"""Reads the experts of one layer into the slots of a rank."""

from collections.abc import Callable, Sequence

import torch

from ep.placement.placement import EMPTY
from model.config import ModelConfig


def num_slots(config: ModelConfig, experts: Sequence[int], *, fold_shared: bool) -> int:
    """One a placed expert, and one for the shared expert if it is folded in. ValueError when the
    model has not just one to fold in."""
    if fold_shared and config.num_shared_experts != 1:
        raise ValueError(
            f"one shared expert can be folded in, the model has {config.num_shared_experts}"
        )
    return len(experts) + fold_shared


def fill_slots(
    read: Callable[[int, str], None],
    stacks: Sequence[torch.Tensor],
    prefix: str,
    experts: Sequence[int],
    *,
    fold_shared: bool = False,
) -> None:
    """`read(slot, stem)` puts the expert whose tensors begin with `stem` into row `slot` of each
    of `stacks`. `experts` by slot: EMPTY ones are left out, replicas read once and copied."""
    first: dict[int, int] = {}
    for slot, expert in enumerate(experts):
        if expert == EMPTY:
            continue
        if expert in first:
            for stack in stacks:
                stack[slot] = stack[first[expert]]
            continue
        first[expert] = slot
        read(slot, f"{prefix}.experts.{expert}")
    if fold_shared:
        read(len(experts), f"{prefix}.shared_experts")
