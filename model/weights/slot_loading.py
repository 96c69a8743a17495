"""Reads the experts of one layer into the slots of a rank."""

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import TypeAlias

import torch

from ep.placement.placement import EMPTY
from model.config import ModelConfig

# What matrices consist of: values, and scales where they have them.
Parts: TypeAlias = tuple[torch.Tensor, ...]
# Experts whose matrices are made into what a slot holds at once: many, so that little is to be
# said to the device; all that is read of them is in memory until then.
AT_ONCE = 8
PROJECTIONS = ("gate", "up", "down")


def load_slots(
    read: Callable[[str], Parts],
    empty: Callable[[int, int, int], Parts],
    config: ModelConfig,
    prefix: str,
    experts: Sequence[int],
    *,
    fold_shared: bool = False,
    made: Callable[[Sequence[Parts]], Iterable[Parts]] = lambda stored: stored,
) -> tuple[Parts, Parts]:
    """gate_up (gate half first) and down of `experts` by slot, EMPTY ones left out, replicas read
    once; one slot more for the shared expert if it is folded in.

    `read(name)` gives the parts of a matrix as they are stored, `made` those [rows, ...] of several
    of one shape, and `empty(slots, rows, columns)` those of as many, nothing in them yet.
    ValueError when the model has not just one expert to fold in.
    """
    if fold_shared and config.num_shared_experts != 1:
        raise ValueError(
            f"one shared expert can be folded in, the model has {config.num_shared_experts}"
        )
    hidden, width = config.hidden_size, config.moe_intermediate_size
    num_slots = len(experts) + fold_shared
    gate_up, down = empty(num_slots, 2 * width, hidden), empty(num_slots, hidden, width)
    slot_of = {
        f"{prefix}.experts.{expert}": slot
        for slot, expert in reversed([*enumerate(experts)])
        if expert != EMPTY
    }
    first = sorted(slot_of.items(), key=itemgetter(1))
    if fold_shared:
        first.append((f"{prefix}.shared_experts", len(experts)))
    for begin in range(0, len(first), AT_ONCE):
        stems, slots = zip(*first[begin : begin + AT_ONCE], strict=True)
        stored = [[read(f"{stem}.{name}_proj.weight") for name in PROJECTIONS] for stem in stems]
        matrices = zip(*map(made, zip(*stored, strict=True)), strict=True)
        for slot, (gate, up, lower) in zip(slots, matrices, strict=True):
            for stack, upper, middle in zip(gate_up, gate, up, strict=True):
                stack[slot, : len(upper)] = upper
                stack[slot, len(upper) :] = middle
            for stack, part in zip(down, lower, strict=True):
                stack[slot] = part
    for slot, expert in enumerate(experts):
        if expert != EMPTY and (source := slot_of[f"{prefix}.experts.{expert}"]) != slot:
            for stack in (*gate_up, *down):
                stack[slot] = stack[source]
    return gate_up, down
