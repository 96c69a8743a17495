"""Log-probabilities of tokens and of their most likely alternatives."""

from collections.abc import Sequence

import torch

from engine.messages import MAX_TOP_LOGPROBS, TokenOut


def best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest values of each row and their tokens, equal ones in order of tokens."""
    values, token_of = logits.topk(count, dim=1)
    token_of, order = token_of.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, token_of.gather(1, order)


def with_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, nums_top: Sequence[int]
) -> list[TokenOut]:
    """logits [S, V], token_ids [S] int64, alternatives wanted of each row -> S tokens, with the
    log-probabilities that the unmodified logits give them."""
    logprobs = logits.float().log_softmax(dim=1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(nums_top)
    most = max(nums_top, default=0)
    if most:
        # Always as many, so that equal ones come out the same whatever else is in the batch.
        values, alternatives = best(logprobs, min(MAX_TOP_LOGPROBS, logits.shape[1]))
        pairs = zip(alternatives[:, :most].tolist(), values[:, :most].tolist(), strict=True)
        tops = [tuple(zip(ids, probs, strict=True)) for ids, probs in pairs]
    return [
        TokenOut(token_id=token_id, logprob=logprob, top=top[:num_top])
        for token_id, logprob, top, num_top in zip(
            token_ids.tolist(), chosen, tops, nums_top, strict=True
        )
    ]
