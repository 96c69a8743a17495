"""Log-probabilities of tokens and of their most likely alternatives."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.link.messages import MAX_TOP_LOGPROBS, TokenOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Of R rows, on the host or still on a device. token_ids [R] int64, chosen [R] float32; the
    best alternatives [R, C] int64 and their values [R, C] float32, or None."""

    token_ids: torch.Tensor
    chosen: torch.Tensor
    alternatives: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def to_host(self) -> "Scores":
        """From a GPU the copies are enqueued only."""

        def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to("cpu", non_blocking=True)

        return Scores(
            token_ids=self.token_ids.to("cpu", non_blocking=True),
            chosen=self.chosen.to("cpu", non_blocking=True),
            alternatives=copied(self.alternatives),
            values=copied(self.values),
        )

    def tokens(self, nums_top: Sequence[int]) -> list[TokenOut]:
        """With so many alternatives of each row. Waits for a device."""
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(nums_top)
        most = max(nums_top, default=0)
        if most:
            assert self.alternatives is not None
            assert self.values is not None
            ids, values = self.alternatives[:, :most].tolist(), self.values[:, :most].tolist()
            tops = [tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        return [
            TokenOut(token_id=token_id, logprob=logprob, top=top[:num_top])
            for token_id, logprob, top, num_top in zip(
                self.token_ids.tolist(), self.chosen.tolist(), tops, nums_top, strict=True
            )
        ]


def best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest values of each row and their tokens, equal ones in order of tokens."""
    values, token_of = logits.topk(count, dim=1)
    token_of, order = token_of.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, token_of.gather(1, order)


def score(logits: torch.Tensor, token_ids: torch.Tensor, with_alternatives: bool) -> Scores:
    """logits [R, V], token_ids [R] int64: what the unmodified logits say of them."""
    logprobs = logits.float().log_softmax(dim=1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    if not with_alternatives:
        return Scores(token_ids=token_ids, chosen=chosen)
    # Always as many, so that equal ones come out the same whatever else is in the batch.
    values, alternatives = best(logprobs, min(MAX_TOP_LOGPROBS, logits.shape[1]))
    return Scores(token_ids=token_ids, chosen=chosen, alternatives=alternatives, values=values)


def with_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, nums_top: Sequence[int]
) -> list[TokenOut]:
    """logits [S, V], token_ids [S] int64, alternatives wanted of each row -> S tokens, with the
    log-probabilities that the unmodified logits give them."""
    return score(logits, token_ids, any(nums_top)).tokens(nums_top)
