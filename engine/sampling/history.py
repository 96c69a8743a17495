"""What the next token of a sequence depends on besides its logits. Torch-free.

It follows from the sampling parameters and the tokens so far alone, so that a request that
begins anew on another worker, with the tokens it has, continues as if nothing had happened.
"""

from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple, Protocol

import numpy as np

from engine.sampling.sampling_params import Sampling
from engine.sampling.thought_count import ThoughtCount
from engine.sampling.token_counts import TokenCounts


class Mask(NamedTuple):
    """What may come in one place: tokens by bits of `words` [ceil(V / 32)] uint32; all unless it
    `is_active`."""

    is_active: bool
    words: np.ndarray

    def allows(self, token_id: int) -> bool:
        return not self.is_active or bool(self.words[token_id // 32] >> token_id % 32 & 1)


class Match(Protocol):
    """How far an output has come in its grammar."""

    @property
    def masks(self) -> Sequence[Mask]:
        """Of the next token, and of that after each draft: as many drafts as there are masks for
        may follow one another."""

    @property
    def is_complete(self) -> bool:
        """Nothing can follow: the sequence is to end."""

    @property
    def is_ready(self) -> bool:
        """Whether it has taken in all tokens; only then another one may come."""

    @property
    def is_slow(self) -> bool:
        """Whether it was late with the last one."""

    def offer(self, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """The tokens that `accept` will be told next, and drafts of those to follow: they are
        looked at meanwhile."""

    def accept(self, token_id: int) -> bool:
        """The next output token; False when the grammar does not allow it. Of a slow match
        `fault` may tell that later."""

    def fault(self) -> str | None:
        """Why there can be no further token."""


class History:
    """`match` is None without a grammar, and until the grammar is compiled (`attach`).

    bias      token ids int32 and what is added to their logits, float32; None: nothing is
    counts    for penalties; None without any
    sampling  the request's own
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.sampling = sampling
        self.bias = _bias(sampling)
        self.counts = TokenCounts() if has_penalties(sampling) else None
        self.match: Match | None = None
        self._num_ahead = 0  # drafts that it is ahead of the output
        budget = sampling.thought_budget
        self._thoughts = ThoughtCount(budget) if budget is not None else None
        longest = max(map(len, sampling.bad_words), default=1)
        self._recent: deque[int] = deque(maxlen=longest - 1)  # that bad words may begin with
        if self.counts is not None and sampling.repetition_penalty != 1:
            self.counts.see(prompt)
        if self.counts is not None or self._thoughts is not None or self._recent.maxlen:
            for token_id in output:
                self._note(token_id)

    @property
    def follows_tokens(self) -> bool:
        """Whether the next token depends on which tokens are before it: a bias does not."""
        return bool(
            self.counts is not None
            or self.sampling.grammar is not None
            or self._thoughts is not None
            or self._recent.maxlen
        )

    @property
    def mask(self) -> Mask | None:
        """Of the next token, by its grammar."""
        return None if self.match is None else self.match.masks[self._num_ahead]

    @property
    def allowed(self) -> tuple[int, ...]:
        """The only tokens that may come next; none: all may."""
        forced = self._thoughts.forced if self._thoughts is not None else ()
        return forced or self.sampling.allowed_token_ids

    @property
    def banned(self) -> list[int]:
        """Tokens that would complete a bad word."""
        recent = tuple(self._recent)
        return [
            last
            for *begin, last in self.sampling.bad_words
            if len(begin) <= len(recent) and recent[len(recent) - len(begin) :] == tuple(begin)
        ]

    @property
    def is_complete(self) -> bool:
        """The output is all that the grammar asks for, and can only end."""
        return self.match is not None and self.match.is_complete

    def attach(self, match: Match) -> None:
        """`match` has taken in the output so far."""
        self.match = match

    def ahead(self, token_id: int) -> "History":
        """As it would be after one more token, with a grammar one of the drafts that may follow;
        itself unchanged."""
        if not self.follows_tokens:
            return self
        after = copy(self)
        after.counts = None if self.counts is None else self.counts.copy()
        after._thoughts, after._recent = copy(self._thoughts), self._recent.copy()
        after._note(token_id)
        after._num_ahead += 1
        return after

    def append(self, token_id: int) -> bool:
        """The next output token; False when the grammar does not allow it."""
        self._note(token_id)
        return self.match is None or self.match.accept(token_id)

    def _note(self, token_id: int) -> None:
        if self.counts is not None:
            self.counts.add(token_id)
        if self._thoughts is not None:
            self._thoughts.add(token_id)
        self._recent.append(token_id)


def history_of(sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> History | None:
    """None when the next token depends on logits and position only. `prompt` is looked at for a
    repetition penalty only."""
    rules = (
        sampling.grammar, sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_words,
        sampling.thought_budget,
    )  # fmt: skip
    return History(sampling, prompt, output) if any(rules) or has_penalties(sampling) else None


def has_penalties(sampling: Sampling) -> bool:
    return bool(
        sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1
    )


def _bias(sampling: Sampling) -> tuple[np.ndarray, np.ndarray] | None:
    if not sampling.logit_bias:
        return None
    token_ids, values = zip(*sampling.logit_bias, strict=True)
    return np.array(token_ids, dtype=np.int32), np.array(values, dtype=np.float32)
