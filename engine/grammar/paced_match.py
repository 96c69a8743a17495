"""A match that works in threads: a step waits a moment for all its masks, and goes on without
those that are late.

    offer(tokens, drafts)  ->  settle(matches)  ->  is_ready: the next token's mask is there

Drafts are walked over on a copy, as far as they may come and there is time, and not right after a
step in which there was none: the match itself never hears of those that are wrong. One that ends
the output is left out: nothing would be sampled behind it.

What a matcher may spend on one request is bounded, see `fault`, and so is each call of the library,
see `grammar_match.LIMITS`. The thread that it keeps is one of many, and yields to the steps.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from core.clock import Clock
from engine.sampling.history import Mask, Match

if TYPE_CHECKING:
    from engine.grammar.grammar_match import GrammarMatch

# What a step waits for the masks of all its rows. Whose mask took longer last time is not run
# ahead: its next token is sampled once the one before it is known and its mask is there.
PATIENCE_SECONDS = 0.005
# CPU time of one request: an allowance, and what each token adds to it.
ALLOWANCE_SECONDS, SECONDS_PER_TOKEN = 2.0, 0.02
LONGEST_SECONDS = 4.0  # for one token, by the clock
MAX_THREADS = 32
NICENESS = 5  # steps go first


class _Work(NamedTuple):
    fits: bool
    masks: list[Mask]
    cpu_seconds: float
    seconds: float


class PacedMatch:
    """Implements `engine.sampling.history.Match`. One thread calls it, but for `masks`: a step
    may look at them until the next `offer`.

    `output` is what the match has to take in before it is ready; it must follow the grammar, else
    `fault` tells.
    """

    def __init__(
        self, match: "GrammarMatch", output: Sequence[int], threads: Executor, clock: Clock
    ) -> None:
        self._match = match
        self._threads = threads
        self._clock = clock
        self._num_tokens = len(output)
        self._cpu_seconds = self._last_seconds = 0.0
        self._fault: str | None = None
        self._masks = [Mask(is_active=True, words=np.empty(0, dtype=np.uint32))]
        self._fits = True
        self._complete = False
        self._offered: list[int] = []  # and not accepted yet
        self._begin(output)

    @property
    def masks(self) -> Sequence[Mask]:
        return self._masks

    @property
    def is_complete(self) -> bool:
        return self._complete and not self._offered

    @property
    def is_ready(self) -> bool:
        if self._job is not None and self._job.done():
            self._take(self._job)
        return self._job is None

    @property
    def is_slow(self) -> bool:
        return self._last_seconds > PATIENCE_SECONDS

    def offer(self, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        assert self._job is None, "the last tokens are not taken in yet"
        self._offered = [*token_ids]
        self._num_tokens += len(token_ids)
        masks = self._masks[: len(token_ids)]
        self._fits = not self._complete and all(map(Mask.allows, masks, token_ids))
        if not self._fits:
            return
        is_active = any(mask.is_active for mask in masks)
        if drafts or is_active or any(map(self._match.may_begin_with, token_ids)):
            self._begin(token_ids, () if self.is_slow else drafts)
        else:  # nothing to work out
            for token_id in token_ids:
                self._match.accept(token_id)
            self._masks = [Mask(self._match.is_active, masks[0].words)]

    def accept(self, token_id: int) -> bool:
        if not self._offered:
            self.offer([token_id])
            settle([self])
        assert self._offered[0] == token_id, "another one was offered"
        del self._offered[0]
        # Those before the last were right drafts. Of a late one, the mask has it, at least.
        return self._fits if self.is_ready and not self._offered else True

    def fault(self) -> str | None:
        if self.is_ready:
            over = self._cpu_seconds - self._num_tokens * SECONDS_PER_TOKEN > ALLOWANCE_SECONDS
        else:
            over = self._clock.now() - self._since > LONGEST_SECONDS
        if over:
            return "this constraint takes too long to match: ambiguous or nested repeats do"
        return self._fault

    @property
    def job(self) -> "Future[_Work] | None":
        """What is to be done before it is ready."""
        return self._job

    def _begin(self, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        self._since = self._clock.now()
        self._job: Future[_Work] | None = self._threads.submit(
            _work, self._match, token_ids, drafts, time.monotonic()
        )

    def _take(self, job: "Future[_Work]") -> None:
        self._job = None
        if (error := job.exception()) is not None:
            self._fault = f"this constraint cannot be kept to: {error}"
            return
        work = job.result()
        self._fits, self._masks = work.fits, work.masks
        self._cpu_seconds += work.cpu_seconds
        self._last_seconds = work.seconds
        self._complete = self._match.is_complete
        if not work.fits:
            self._fault = f"the first {self._num_tokens} tokens do not follow the grammar"


def settle(matches: Sequence[Match]) -> None:
    """Waits a moment for what was offered, for all together."""
    jobs = [one.job for one in matches if isinstance(one, PacedMatch) and one.job is not None]
    if jobs:
        wait(jobs, PATIENCE_SECONDS)


def match_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS, "match", initializer=yield_to_steps)


def yield_to_steps() -> None:
    """Of the calling thread, on Linux."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _work(
    match: "GrammarMatch", token_ids: Sequence[int], drafts: Sequence[int], since: float
) -> _Work:
    """What the drafts cost is not counted: the request has not asked for them."""
    began = time.thread_time()
    fits = all(match.accept(token_id) for token_id in token_ids)
    masks = [Mask(match.is_active, match.mask())]
    cpu_seconds = time.thread_time() - began
    if fits and drafts:
        masks += _masks_ahead(match.copied(), drafts, since + PATIENCE_SECONDS / 2)
    return _Work(fits, masks, cpu_seconds, time.monotonic() - since)


def _masks_ahead(match: "GrammarMatch", drafts: Sequence[int], until: float) -> Iterator[Mask]:
    with suppress(ValueError):  # which says something of the output only if it comes to that
        for draft in drafts:
            if time.monotonic() > until or not match.accept(draft) or match.is_complete:
                return
            yield Mask(match.is_active, match.mask())
