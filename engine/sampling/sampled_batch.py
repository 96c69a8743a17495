"""Tokens that were sampled, on the device and on their way to the host."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.link.messages import TokenOut
from engine.sampling.logprobs import Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """Of S rows.

    token_ids   [S] int64, on the device
    host_ids    the same on the host, once `copied` has passed
    scores      of the rows `scored`, with `nums_top` alternatives of each, as `host_ids`
    host_drafts [B, K] int64 of B requests, what may follow; None: there are none
    copied      after all copies; None where there is nothing to wait for
    """

    token_ids: torch.Tensor
    host_ids: torch.Tensor
    scores: Scores | None = None
    scored: tuple[int, ...] = ()
    nums_top: tuple[int, ...] = ()
    host_drafts: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None

    @classmethod
    def fetch(
        cls,
        token_ids: torch.Tensor,
        scores: Scores | None = None,
        scored: Sequence[int] = (),
        nums_top: Sequence[int] = (),
    ) -> "SampledBatch":
        """Enqueues the copies to the host."""
        host_ids = token_ids.to("cpu", non_blocking=True)
        host_scores = None if scores is None else scores.to_host()
        return cls(
            token_ids=token_ids,
            host_ids=host_ids,
            scores=host_scores,
            scored=tuple(scored),
            nums_top=tuple(nums_top),
            copied=_event(token_ids),
        )

    def with_drafts(self, drafts: torch.Tensor) -> "SampledBatch":
        """[B, K] int64 on the device, made after the tokens; enqueues their copy, too."""
        host_drafts = drafts.to("cpu", non_blocking=True)
        return replace(self, host_drafts=host_drafts, copied=_event(drafts))

    @property
    def is_here(self) -> bool:
        """Whether all of it is on the host."""
        return self.copied is None or self.copied.query()

    def wait(self) -> None:
        """Until all of it is on the host."""
        if self.copied is not None:
            self.copied.synchronize()

    def tokens(self) -> list[TokenOut]:
        """[S]; waits."""
        self.wait()
        out = [TokenOut(token_id=token_id) for token_id in self.host_ids.tolist()]
        if self.scores is not None:
            scored = self.scores.tokens(self.nums_top)
            for row, token in zip(self.scored, scored, strict=True):
                out[row] = token
        return out


def _event(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """After all that is enqueued; None on a CPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event
