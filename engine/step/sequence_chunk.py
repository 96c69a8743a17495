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
    checks     how to sample the tokens before that one, as many as the chunk ends in drafts: each
               is right if it is what is sampled in its place, and so were all before it
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
    checks: tuple[SampleRow, ...] = ()
    scores: PromptScores | None = None
    following: int = 0
    follows: PendingToken | None = None

    @property
    def waits_for_history(self) -> bool:
        """Whether the token cannot be sampled before the one in flight is known on the host."""
        history = self.sample.history if self.sample is not None else None
        return self.follows is not None and history is not None and history.follows_tokens

    @property
    def samples(self) -> tuple[SampleRow, ...]:
        """Of all its last tokens that are sampled after, in order."""
        return self.checks if self.sample is None else (*self.checks, self.sample)

    @property
    def drafts(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - len(self.checks) :]

    @property
    def num_seen(self) -> int:
        """Tokens at its begin whose KV is there, computed for their states."""
        return max(0, len(self.token_ids) - 1 - len(self.checks))

    @property
    def num_rows(self) -> int:
        """How many of its last tokens need logits."""
        return len(self.token_ids) if self.scores is not None else len(self.samples)
