"""From logits to tokens.

For each row: its history's rules (`logit_rules`), suppressed and banned tokens out, then logits /
temperature, then the `top_k` largest, then the smallest set of largest ones with probability >=
`top_p`, then those at least `min_p` times as likely as the best. What is left, in descending
order, is inverted at u(seed, position) (`uniform`). Ties keep the order of token ids.
Temperature 0 takes the largest logit.

A row's result depends on that row alone. Log-probabilities are those of the unmodified
distribution (all tokens, temperature 1).

On a GPU nothing here waits for the device: parameters go there by copies that are enqueued, tokens
and log-probabilities come back the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.link.messages import TokenOut
from engine.sampling.history import History
from engine.sampling.logit_rules import apply_history
from engine.sampling.logprobs import best, score
from engine.sampling.sampled_batch import SampledBatch
from engine.sampling.sampling_params import Sampling
from engine.sampling.uniform import seeds_to_int64, uniform
from kernels.build.upload import upload
from kernels.sampling.sample import sample as sample_kernel

NUM_CANDIDATES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """How one row of logits is sampled. `position` is that of the token to be sampled (the
    number of tokens before it); `suppressed` are token ids that must not come out, unless its
    history allows no other; `history` is None when logits and position decide alone."""

    sampling: Sampling
    position: int
    suppressed: tuple[int, ...] = ()
    history: History | None = None


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[TokenOut]:
    """logits [S, V] float32, one `SampleRow` a row -> S tokens. `logits` is left unchanged."""
    return draw(logits, rows).tokens()


def draw(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> SampledBatch:
    """As `sample`; on a GPU all of it is enqueued only. `change` may put others in the place of
    tokens [S] that were drawn."""
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    device = logits.device
    if not rows:
        return SampledBatch.fetch(torch.empty(0, dtype=torch.int64, device=device))
    allowed = _suppress(apply_history(logits, [row.history for row in rows]), rows)
    token_ids = _choose(allowed, rows)
    if change is not None:
        token_ids = change(token_ids)
    wanted = [
        index
        for index, row in enumerate(rows)
        if row.sampling.logprobs or row.sampling.top_logprobs
    ]
    if not wanted:
        return SampledBatch.fetch(token_ids)
    index = upload(np.array(wanted), device)
    nums_top = [rows[i].sampling.top_logprobs for i in wanted]
    scores = score(logits[index], token_ids[index], any(nums_top))
    return SampledBatch.fetch(token_ids, scores, wanted, nums_top)


def _choose(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """[S, V] float32 -> [S] int64."""
    random = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    if not random:
        return logits.argmax(dim=1)
    if logits.is_cuda:
        return choose_on_device(logits, rows)
    if len(random) == len(rows):
        return _draw(logits, rows)
    token_ids = logits.argmax(dim=1)
    index = torch.tensor(random)
    token_ids[index] = _draw(logits[index], [rows[i] for i in random])
    return token_ids


def choose_on_device(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """[S, V] float32 -> [S] int64, with one copy to the device and without a look back at what
    the logits are. Parameters are float32 here: see `sample` for when that can be seen."""
    num_rows = len(rows)
    numbers = _numbers(rows)
    sampling = [row.sampling for row in rows]
    floats = [(one.temperature, one.top_p or 1.0, one.min_p) for one in sampling]
    top_k = np.array([min(one.top_k, logits.shape[1]) for one in sampling], dtype=np.int32)
    parts = (numbers, np.array(floats, dtype=np.float32).T, top_k)
    packed = upload(np.concatenate([part.ravel().view(np.uint8) for part in parts]), logits.device)
    uniforms, knobs, cut = packed.split([8 * num_rows, 12 * num_rows, 4 * num_rows])
    temperature, top_p, min_p = knobs.view(torch.float32).view(3, num_rows)
    return sample_kernel(
        logits,
        temperature,
        cut.view(torch.int32),
        top_p,
        min_p,
        uniforms.view(torch.float64),
    )


def _suppress(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    pairs = [
        (index, token)
        for index, row in enumerate(rows)
        for token in (*row.suppressed, *(row.history.banned if row.history is not None else ()))
        if token < logits.shape[1]  # a stop token may be one that the model never says
    ]
    if not pairs:
        return logits
    at_row, at_token = upload(np.array(pairs), logits.device).t()
    allowed = logits.index_put((at_row, at_token), logits.new_full((), -torch.inf))
    if any(row.history is not None for row in rows):
        # A grammar, or the tokens that are allowed, may leave nothing else.
        empty = torch.isneginf(allowed.amax(dim=1, keepdim=True))
        allowed = torch.where(empty, logits, allowed)
    return allowed


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """[S, V] float32, rows with temperature > 0 -> [S] int64.

    Sorting a whole vocabulary is most of the work: the best few tokens are tried first, and
    only rows that they do not decide are sorted.
    """
    vocab_size = logits.shape[1]
    knobs = torch.tensor([_knobs(row.sampling, vocab_size) for row in rows], dtype=torch.float64)
    numbers = torch.from_numpy(_numbers(rows)).unsqueeze(1)
    if vocab_size <= 2 * NUM_CANDIDATES:
        return _draw_sorted(logits, knobs, numbers)
    ordered, token_of = best(logits, NUM_CANDIDATES)
    place, sure = _invert(ordered, knobs, numbers, _total_weight(logits, knobs), vocab_size)
    token_ids = token_of.gather(1, place).squeeze(1)
    unsure = (~sure).squeeze(1).nonzero().squeeze(1)
    if unsure.numel():
        token_ids[unsure] = _draw_sorted(logits[unsure], knobs[unsure], numbers[unsure])
    return token_ids


def _draw_sorted(logits: torch.Tensor, knobs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    ordered, token_of = logits.sort(dim=1, descending=True, stable=True)
    place, _ = _invert(ordered, knobs, numbers, torch.zeros_like(numbers), logits.shape[1])
    return token_of.gather(1, place).squeeze(1)


def _total_weight(logits: torch.Tensor, knobs: torch.Tensor) -> torch.Tensor:
    """[S, 1] float64, sum of the weights of all tokens."""
    shifted = logits.double() - logits.amax(dim=1, keepdim=True).double()
    return (shifted / knobs[:, :1]).exp().sum(dim=1, keepdim=True)


def _invert(
    ordered: torch.Tensor,  # [S, C] the C largest logits, descending
    knobs: torch.Tensor,  # [S, 4] float64: temperature, top_k, top_p, min_p
    numbers: torch.Tensor,  # [S, 1] float64 in [0, 1)
    total_weight: torch.Tensor,  # [S, 1] float64, of all V tokens; not needed when C = V
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Filters and inverts: [S, 1] index of the token drawn, [S, 1] bool whether that is certain.

    It is not when the filters keep more than the C tokens, when the number points after them,
    or when the token drawn is as likely as the last of them, which may be any of its equals.
    """
    count = ordered.shape[1]
    temperature, top_k, top_p, min_p = knobs.unsqueeze(2).unbind(1)
    # Shifted first: dividing large logits by a tiny temperature must not overflow.
    weight = ((ordered.double() - ordered[:, :1].double()) / temperature).exp()
    weight = weight.masked_fill(torch.arange(count, device=ordered.device) >= top_k, 0.0)
    total = torch.where(top_k > count, total_weight, weight.sum(dim=1, keepdim=True))
    before = weight.cumsum(dim=1) - weight
    keep = (before < top_p * total) & (weight >= min_p)
    keep[:, 0] = True
    weight = weight * keep
    reached = weight.cumsum(dim=1)
    is_inside = (top_k <= count) | ~keep[:, -1:]  # the filters cut within the C tokens
    target = numbers * torch.where(is_inside, reached[:, -1:], total)
    last = (weight > 0).sum(dim=1, keepdim=True) - 1
    place = (reached <= target).sum(dim=1, keepdim=True).minimum(last)
    if count == vocab_size:
        return place, torch.ones_like(is_inside)
    is_uncut = (top_k >= vocab_size) & (top_p >= 1) & (min_p <= 0) & (target < reached[:, -1:])
    has_total = (top_k <= count) | (top_k >= vocab_size)
    is_distinct = ordered.gather(1, place) > ordered[:, -1:]
    return place, (is_inside | is_uncut) & has_total & is_distinct


def _numbers(rows: Sequence[SampleRow]) -> np.ndarray:
    """[S] float64, a random number for each row."""
    seeds = torch.tensor(seeds_to_int64([row.sampling.seed for row in rows]))
    positions = torch.tensor([row.position for row in rows])
    return uniform(seeds, positions).numpy()


def _knobs(sampling: Sampling, vocab_size: int) -> tuple[float, float, float, float]:
    top_k = min(sampling.top_k or vocab_size, vocab_size)
    return sampling.temperature, float(top_k), sampling.top_p or 1.0, sampling.min_p
