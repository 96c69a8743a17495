"""From logits to tokens.

For each row: suppressed tokens out, then logits / temperature, then the `top_k` largest, then
the smallest set of largest ones with probability >= `top_p`, then those at least `min_p` times
as likely as the best. What is left, in descending order, is inverted at u(seed, position)
(`engine.uniform`). Ties keep the order of token ids. Temperature 0 takes the largest logit.

A row's result depends on that row alone. Log-probabilities are those of the unmodified
distribution (all tokens, temperature 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.messages import Sampling, TokenOut
from engine.uniform import seeds_to_int64, uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """How one row of logits is sampled. `position` is that of the token to be sampled (the
    number of tokens before it); `suppressed` are token ids that must not come out."""

    sampling: Sampling
    position: int
    suppressed: tuple[int, ...] = ()


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[TokenOut]:
    """logits [S, V] float32, one `SampleRow` a row -> S tokens. `logits` is left unchanged."""
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    if not rows:
        return []
    allowed = _suppress(logits, rows)
    token_ids = allowed.argmax(dim=1)
    random = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    if len(random) == len(rows):
        token_ids = _draw(allowed, rows)
    elif random:
        index = torch.tensor(random, device=logits.device)
        token_ids[index] = _draw(allowed[index], [rows[i] for i in random])
    wanted = [
        index
        for index, row in enumerate(rows)
        if row.sampling.logprobs or row.sampling.top_logprobs
    ]
    if not wanted:
        return [TokenOut(token_id=token_id) for token_id in token_ids.tolist()]
    return _with_logprobs(logits, token_ids, rows, wanted)


def _suppress(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    pairs = [
        (index, token)
        for index, row in enumerate(rows)
        for token in row.suppressed
        if token < logits.shape[1]  # a stop token may be one that the model never says
    ]
    if not pairs:
        return logits
    at_row, at_token = torch.tensor(pairs, device=logits.device).t()
    return logits.index_put((at_row, at_token), logits.new_tensor(-torch.inf))


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """[S, V] float32, rows with temperature > 0 -> [S] int64."""
    device, vocab_size = logits.device, logits.shape[1]
    # One copy to the device: row by row temperature, top_k, top_p, min_p.
    knobs = torch.tensor(
        [_knobs(row.sampling, vocab_size) for row in rows], dtype=torch.float64
    ).to(device)
    counters = torch.tensor(
        [seeds_to_int64([row.sampling.seed for row in rows]), [row.position for row in rows]]
    ).to(device)
    temperature, top_k, top_p, min_p = knobs.unsqueeze(2).unbind(1)  # each [S, 1]
    ordered, token_of = logits.sort(dim=1, descending=True, stable=True)
    # Shifted first: dividing large logits by a tiny temperature must not overflow.
    ordered = (ordered.double() - ordered[:, :1].double()) / temperature
    weight = ordered.exp()  # the best has weight 1
    weight = weight.masked_fill(torch.arange(vocab_size, device=device) >= top_k, 0.0)
    before = weight.cumsum(dim=1) - weight
    keep = (before < top_p * weight.sum(dim=1, keepdim=True)) & (weight >= min_p)
    keep[:, 0] = True
    weight = weight * keep
    cumulative = weight.cumsum(dim=1)
    target = uniform(counters[0], counters[1]).unsqueeze(1) * cumulative[:, -1:]
    place = (cumulative <= target).sum(dim=1, keepdim=True)
    last = (weight > 0).sum(dim=1, keepdim=True) - 1
    return token_of.gather(1, place.minimum(last)).squeeze(1)


def _knobs(sampling: Sampling, vocab_size: int) -> tuple[float, float, float, float]:
    top_k = min(sampling.top_k or vocab_size, vocab_size)
    return sampling.temperature, float(top_k), sampling.top_p or 1.0, sampling.min_p


def _with_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[SampleRow], wanted: list[int]
) -> list[TokenOut]:
    """Tokens of all rows, log-probabilities for those in `wanted`."""
    index = torch.tensor(wanted, device=logits.device)
    logprobs = logits[index].float().log_softmax(dim=1)  # [W, V]
    chosen = logprobs.gather(1, token_ids[index].unsqueeze(1)).squeeze(1).tolist()
    most = max(rows[i].sampling.top_logprobs for i in wanted)
    most = min(most, logits.shape[1])
    values, alternatives = logprobs.topk(most, dim=1)
    tops = [
        tuple(zip(ids, probs, strict=True))
        for ids, probs in zip(alternatives.tolist(), values.tolist(), strict=True)
    ]
    out = [TokenOut(token_id=token_id) for token_id in token_ids.tolist()]
    for place, i in enumerate(wanted):
        top = tops[place][: rows[i].sampling.top_logprobs]
        out[i] = TokenOut(token_id=out[i].token_id, logprob=chosen[place], top=top)
    return out
