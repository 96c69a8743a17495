"""What a request's history does to its logits, in this order, all before temperature:

    logit_bias           x += bias of the token
    repetition_penalty   x = x / r where x > 0, else x * r, of tokens in prompt or output
    frequency_penalty    x -= f * count in the output
    presence_penalty     x -= p, of tokens in the output
    grammar              x = -inf of tokens that cannot come next

Bias and penalties touch only the tokens that have one: what the host sends is as long as the
lists of these tokens, not as the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.history import History, Match

WORD_BITS = 32


def apply_history(logits: torch.Tensor, histories: Sequence[History | None]) -> torch.Tensor:
    """logits [S, V] float32, one history a row -> [S, V]; `logits` itself is left unchanged."""
    present = [(row, history) for row, history in enumerate(histories) if history is not None]
    if not present:
        return logits
    logits = logits.clone()
    _add_bias(logits, [(row, history) for row, history in present if history.bias is not None])
    _penalise(logits, [(row, history) for row, history in present if history.counts is not None])
    _mask(
        logits,
        [
            (row, history.match)
            for row, history in present
            if history.match is not None and history.match.is_active
        ],
    )
    return logits


def _add_bias(logits: torch.Tensor, present: list[tuple[int, History]]) -> None:
    if not present:
        return
    biases = [history.bias for _, history in present if history.bias is not None]
    rows = np.repeat([row for row, _ in present], [len(token_ids) for token_ids, _ in biases])
    device = logits.device
    at = (
        torch.from_numpy(rows).to(device),
        torch.from_numpy(np.concatenate([token_ids for token_ids, _ in biases])).to(device),
    )
    logits[at] += torch.from_numpy(np.concatenate([values for _, values in biases])).to(device)


def _penalise(logits: torch.Tensor, present: list[tuple[int, History]]) -> None:
    counts = [history.counts for _, history in present if history.counts is not None]
    sizes = [len(one.token_ids) for one in counts]
    if not sum(sizes):
        return
    device = logits.device
    places = np.stack(
        [
            np.repeat([row for row, _ in present], sizes),
            np.concatenate([one.token_ids for one in counts]),
        ]
    )
    knobs = np.array(
        [
            (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            for params in (history.sampling for _, history in present)
        ],
        dtype=np.float32,
    )
    figures = np.concatenate(
        [np.concatenate([one.output_counts for one in counts])[None], knobs.repeat(sizes, 0).T]
    )
    row, token = torch.from_numpy(places).to(device)
    count, repetition, frequency, presence = torch.from_numpy(figures).to(device)
    values = logits[row, token]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= count * frequency
    values -= (count > 0) * presence
    logits[row, token] = values


def _mask(logits: torch.Tensor, present: list[tuple[int, Match]]) -> None:
    """A row that no token may follow stays as it is: its token is refused afterwards."""
    if not present:
        return
    matches = [match for _, match in present]
    vocab_size = logits.shape[1]
    bits = torch.empty(len(matches), -(-vocab_size // WORD_BITS), dtype=torch.int32)
    matches[0].fill(matches, bits)
    bits = bits.to(logits.device)
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    allowed = ((bits.unsqueeze(2) >> shifts) & 1).flatten(1)[:, :vocab_size].bool()
    allowed |= ~allowed.any(dim=1, keepdim=True)
    rows = torch.tensor([row for row, _ in present], device=logits.device)
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
