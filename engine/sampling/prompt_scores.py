"""Log-probabilities of a prompt's own tokens, gathered chunk by chunk."""

from collections.abc import Callable, Sequence

import torch

from engine.link.messages import TokenOut
from engine.sampling.logprobs import with_logprobs

# Logits of so many positions exist at a time: a whole chunk's would take gigabytes.
SLICE_TOKENS = 64


class PromptScores:
    """`tokens` holds what is known so far: prompt token i, its log-probability after the
    tokens before it, and alternatives. The first one has none: its `logprob` means nothing."""

    def __init__(self, prompt: Sequence[int], num_top: int) -> None:
        self._prompt = prompt
        self._num_top = num_top
        self.tokens = [TokenOut(token_id=prompt[0])]

    def add(
        self,
        start: int,
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """`hidden` [T, H] of the tokens from position `start` on, chunks in order; `logits_of`
        makes logits [S, V] of hidden states [S, H]. What lies after the prompt's last token
        is not part of the prompt."""
        assert start == len(self.tokens) - 1, (start, len(self.tokens))
        targets = self._prompt[start + 1 : start + 1 + hidden.shape[0]]
        for begin in range(0, len(targets), SLICE_TOKENS):
            piece = torch.tensor(targets[begin : begin + SLICE_TOKENS], device=hidden.device)
            logits = logits_of(hidden[begin : begin + len(piece)])
            self.tokens += with_logprobs(logits, piece, [self._num_top] * len(piece))
