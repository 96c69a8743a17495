"""A match that works in threads: a step waits a moment for all its masks, and goes on without
those that are late.

    offer(token)  ->  settle(matches)  ->  is_ready: the mask for the next token is there

What a matcher may spend on one request is bounded, see `fault`, and so is each call of the library,
see `grammar_match.LIMITS`. The thread that it keeps is one of many, and yields to the steps.
"""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from core.clock import Clock
from engine.sampling.history import Match

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
    mask: np.ndarray
    cpu_seconds: float
    seconds: float


class PacedMatch:
    """Implements `engine.sampling.history.Match`. One thread calls it, but for `is_active` and
    `fill`, which a step may call until the next `offer`.

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
        self._mask = np.empty(0, dtype=np.uint32)
        self._fits = self._active = True
        self._complete = False
        self._offered: int | None = None
        self._begin(output)

    @property
    def is_active(self) -> bool:
        return self._active

    @property
    def is_complete(self) -> bool:
        return self._complete

    @property
    def is_ready(self) -> bool:
        if self._job is not None and self._job.done():
            self._take(self._job)
        return self._job is None

    @property
    def is_slow(self) -> bool:
        return self._last_seconds > PATIENCE_SECONDS

    def offer(self, token_id: int) -> None:
        assert self._job is None, "the last token is not taken in yet"
        self._offered = token_id
        self._num_tokens += 1
        self._fits = not (self._complete or (self._active and not self._allows(token_id)))
        if not self._fits:
            return
        if self._active or self._match.may_begin_with(token_id):
            self._begin([token_id])
        else:  # nothing to work out
            self._match.accept(token_id)
            self._active = self._match.is_active

    def accept(self, token_id: int) -> bool:
        if self._offered is None:
            self.offer(token_id)
            settle([self])
        assert self._offered == token_id, "another one was offered"
        self._offered = None
        return self._fits if self.is_ready else True  # the mask has it, at least

    def fill(self, matches: Sequence[Match], bits: Any) -> None:  # noqa: ANN401 - as `Match`
        words = bits.numpy().view(np.uint32)
        for row, match in enumerate(matches):
            assert isinstance(match, PacedMatch)
            words[row] = match._mask

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

    def _begin(self, token_ids: Sequence[int]) -> None:
        self._since = self._clock.now()
        self._job: Future[_Work] | None = self._threads.submit(
            _work, self._match, token_ids, time.monotonic()
        )

    def _take(self, job: "Future[_Work]") -> None:
        self._job = None
        if (error := job.exception()) is not None:
            self._fault = f"this constraint cannot be kept to: {error}"
            return
        work = job.result()
        self._fits, self._mask = work.fits, work.mask
        self._cpu_seconds += work.cpu_seconds
        self._last_seconds = work.seconds
        self._active, self._complete = self._match.is_active, self._match.is_complete
        if not work.fits:
            self._fault = f"the first {self._num_tokens} tokens do not follow the grammar"

    def _allows(self, token_id: int) -> bool:
        return bool(self._mask[token_id // 32] >> token_id % 32 & 1)


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


def _work(match: "GrammarMatch", token_ids: Sequence[int], since: float) -> _Work:
    began = time.thread_time()
    fits = all(match.accept(token_id) for token_id in token_ids)
    mask = match.mask()
    return _Work(fits, mask, time.thread_time() - began, time.monotonic() - since)
