"""What a step computes of one request."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sampling.prompt_scores import PromptScores
from engine.sampling.sampler import SampleRow
from engine.step.pending_step import PendingToken

UNKNOWN = (0,)  # `SequenceChunk.token_ids` of a token that the host does not know yet


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceChunk:
    """Consecutive tokens of one request.

    token_ids  the tokens to compute, at least one
    start      position of the first of them; the KV of all before it is in the pages already
    pages      page ids in token order, at least up to the last of these tokens; read during
               the call only, so that a live list may be passed
    sample     how to sample the token after the last one; None: not wanted
    scores     where log-probabilities of the prompt that this is a piece of are gathered; None:
               not wanted
    following  the token after the last one, for the KV of an MTP layer; 0 where there is none yet:
               whoever drafts writes that position anew
    follows    the step under way that samples its only token; None: `token_ids` says them
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: SampleRow | None = None
    scores: PromptScores | None = None
    following: int = 0
    follows: PendingToken | None = None

    @property
    def waits_for_history(self) -> bool:
        """Whether the token cannot be sampled before the one in flight is known on the host."""
        history = self.sample.history if self.sample is not None else None
        return self.follows is not None and history is not None and history.follows_tokens

    @property
    def num_rows(self) -> int:
        """How many of its last tokens need logits."""
        return len(self.token_ids) if self.scores is not None else int(self.sample is not None)
