"""What a request's history does to its logits, in this order, all before temperature:

    logit_bias           x += bias of the token
    repetition_penalty   x = x / r where x > 0, else x * r, of tokens in prompt or output
    frequency_penalty    x -= f * count in the output
    presence_penalty     x -= p, of tokens in the output
    allowed tokens       x = -inf of all others, where some are named or forced
    grammar              x = -inf of tokens that cannot come next

Bias and penalties touch only the tokens that have one: what the host sends is as long as the
lists of these tokens, not as the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling.history import History, Mask
from kernels.build.upload import upload

OF_OCTET = (1 << np.arange(8)).astype(np.uint8)


def apply_history(logits: torch.Tensor, histories: Sequence[History | None]) -> torch.Tensor:
    """logits [S, V] float32, one history a row -> [S, V]; `logits` itself is left unchanged."""
    present = [(row, history) for row, history in enumerate(histories) if history is not None]
    if not present:
        return logits
    masks = [
        (row, mask)
        for row, history in present
        if (mask := history.mask) is not None and mask.is_active
    ]
    logits = logits.clone()
    _add_bias(logits, present)
    _penalise(logits, present)
    _restrict(logits, present)
    _mask(logits, masks)
    return logits


def _add_bias(logits: torch.Tensor, present: list[tuple[int, History]]) -> None:
    biases = [(row, history.bias) for row, history in present if history.bias is not None]
    if not biases:
        return
    device = logits.device
    sizes = [len(token_ids) for _, (token_ids, _) in biases]
    rows = upload(np.repeat([row for row, _ in biases], sizes), device)
    tokens = upload(np.concatenate([token_ids for _, (token_ids, _) in biases]), device)
    logits[rows, tokens] += upload(np.concatenate([values for _, (_, values) in biases]), device)


def _penalise(logits: torch.Tensor, present: list[tuple[int, History]]) -> None:
    counted = [(row, one.counts, one.sampling) for row, one in present if one.counts is not None]
    sizes = [len(counts.token_ids) for _, counts, _ in counted]
    if not sum(sizes):
        return
    device = logits.device
    rows = upload(np.repeat([row for row, _, _ in counted], sizes), device)
    tokens = upload(np.concatenate([counts.token_ids for _, counts, _ in counted]), device)
    count = upload(np.concatenate([counts.output_counts for _, counts, _ in counted]), device)
    knobs = [
        (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        for _, _, params in counted
    ]
    spread = np.repeat(np.array(knobs, dtype=np.float32).T, sizes, axis=1)
    repetition, frequency, presence = upload(spread, device)
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= count * frequency
    values -= (count > 0) * presence
    logits[rows, tokens] = values


def _restrict(logits: torch.Tensor, present: list[tuple[int, History]]) -> None:
    allowed = [(row, one.allowed) for row, one in present if one.allowed]
    if not allowed:
        return
    device = logits.device
    sizes = [len(token_ids) for _, token_ids in allowed]
    restricted = upload(np.array([row for row, _ in allowed]), device)
    rows = upload(np.repeat([row for row, _ in allowed], sizes), device)
    tokens = upload(np.concatenate([token_ids for _, token_ids in allowed]), device)
    values = logits[rows, tokens]
    logits[restricted] = -torch.inf
    logits[rows, tokens] = values


def _mask(logits: torch.Tensor, present: list[tuple[int, Mask]]) -> None:
    """A row that no token may follow stays as it is: its token is refused afterwards."""
    if not present:
        return
    device, vocab_size = logits.device, logits.shape[1]
    octets = upload(np.stack([mask.words for _, mask in present]).view(np.uint8), device)
    of_octet = upload(OF_OCTET, device)
    forbidden = ((octets.unsqueeze(2) & of_octet) == 0).flatten(1)[:, :vocab_size]
    forbidden &= ~forbidden.all(dim=1, keepdim=True)
    rows = upload(np.array([row for row, _ in present]), device)
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
