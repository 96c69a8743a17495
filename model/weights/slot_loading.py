"""Reads the experts of one layer into the slots of a rank."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from ep.placement.placement import EMPTY
from model.config import ModelConfig

# What matrices consist of: values, and scales where they have them.
Parts: TypeAlias = tuple[torch.Tensor, ...]


def load_slots(
    read: Callable[[str], Parts],
    empty: Callable[[int, int, int], Parts],
    config: ModelConfig,
    prefix: str,
    experts: Sequence[int],
    *,
    fold_shared: bool = False,
) -> tuple[Parts, Parts]:
    """gate_up (gate half first) and down of `experts` by slot, EMPTY ones left out, replicas read
    once; one slot more for the shared expert if it is folded in.

    `read(name)` gives the parts [rows, ...] of a matrix, `empty(slots, rows, columns)` those of as
    many, nothing in them yet. ValueError when the model has not just one expert to fold in.
    """
    if fold_shared and config.num_shared_experts != 1:
        raise ValueError(
            f"one shared expert can be folded in, the model has {config.num_shared_experts}"
        )
    hidden, width = config.hidden_size, config.moe_intermediate_size
    num_slots = len(experts) + fold_shared
    gate_up, down = empty(num_slots, 2 * width, hidden), empty(num_slots, hidden, width)

    def fill(slot: int, stem: str) -> None:
        names = (f"{stem}.{name}_proj.weight" for name in ("gate", "up", "down"))
        gate, up, lower = map(read, names)
        for stack, upper, middle in zip(gate_up, gate, up, strict=True):
            stack[slot, : len(upper)] = upper
            stack[slot, len(upper) :] = middle
        for stack, part in zip(down, lower, strict=True):
            stack[slot] = part

    first: dict[int, int] = {}
    for slot, expert in enumerate(experts):
        if expert in first:
            for stack in (*gate_up, *down):
                stack[slot] = stack[first[expert]]
        elif expert != EMPTY:
            first[expert] = slot
            fill(slot, f"{prefix}.experts.{expert}")
    if fold_shared:
        fill(len(experts), f"{prefix}.shared_experts")
    return gate_up, down
