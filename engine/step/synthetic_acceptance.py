"""Which drafts are right where weights are made up: made up, too.

A share of RATES[j] of the steps that propose j + 1 drafts or more accepts so many at least: with
1, 2 and 3 drafts a step gives 1.84, 2.50 and 2.98 tokens on average, as public boards of speeds
have it. Which steps those are depends on their positions only.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling.uniform import uniform
from engine.step.sequence_chunk import SequenceChunk
from kernels.build.upload import upload

RATES = (0.84, 0.66, 0.48, 0.36, 0.27)


def mean_length(num_drafts: int) -> float:
    """Tokens of a request and step."""
    return 1.0 + sum(RATES[:num_drafts])


def accept_by_rate(
    token_ids: torch.Tensor, chunks: Sequence[SequenceChunk], vocab_size: int
) -> torch.Tensor:
    """[S] int64, tokens that were sampled after all rows of the chunks -> [S]: the draft in the
    place of a token where that is to be right, another one than the draft where it is not."""
    positions = [chunk.start for chunk in chunks]
    numbers = uniform(torch.zeros(len(chunks), dtype=torch.int64), torch.tensor(positions)).tolist()
    told = [
        pair
        for chunk, number in zip(chunks, numbers, strict=True)
        for pair in (
            *zip(chunk.drafts, (number < rate for rate in RATES), strict=False),
            (-1, False),
        )
    ]
    drafts, is_right = upload(np.array(told, dtype=np.int64).reshape(-1, 2), token_ids.device).t()
    wrong = torch.where(token_ids == drafts, (token_ids + 1) % vocab_size, token_ids)
    return torch.where(is_right > 0, drafts, wrong)
