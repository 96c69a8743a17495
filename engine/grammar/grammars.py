"""Grammars of requests, compiled beside the rank's loop: no step ever waits for one.

    begin(name, sampling, output)  ->  poll() ... (name, match)  or  (name, why not)

Each distinct grammar is compiled once, as long as it is remembered: the most recently used ones
are, up to a number and a size.
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from core.clock import Clock
from core.errors import EpserveError, InternalError, InvalidRequest, Overloaded
from core.log import get_logger
from engine.grammar.paced_match import PacedMatch, match_threads, yield_to_steps
from engine.sampling.history import Match
from engine.sampling.sampling_params import Grammar, Sampling

log = get_logger("engine.grammars")

MAX_REMEMBERED = 128
MAX_REMEMBERED_BYTES = 256 * 2**20
# Who waits longer is told that the grammar is too much, and its thread goes on with it; or, where
# no thread has come to it, that others' are.
COMPILE_SECONDS = 20.0
NUM_THREADS = 4
# Compiled grammars wake no loop: one that waits looks this often.
GRAMMAR_POLL_SECONDS = 0.002


@dataclass(slots=True)
class _Waiting:
    sampling: Sampling
    output: Sequence[int]
    compiled: "Future[Any]"
    since: float
    match: PacedMatch | None = None


class Grammars:
    """All calls from the loop's thread; nothing is loaded before the first grammar comes."""

    def __init__(
        self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], clock: Clock
    ) -> None:
        self._source = (folder, vocab_size, eos_token_ids)
        self._clock = clock
        self._threads: ThreadPoolExecutor | None = None
        self._match_threads: ThreadPoolExecutor | None = None
        self._compiler: Future[Any] | None = None
        self._remembered: OrderedDict[Grammar, Future[Any]] = OrderedDict()
        self._waiting: dict[str, _Waiting] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def begin(self, name: str, sampling: Sampling, output: Sequence[int] = ()) -> None:
        """`poll` will tell of `name` once; `sampling` has a grammar, whose match is to be brought
        to where `output` is."""
        assert sampling.grammar is not None
        key = msgspec.structs.replace(sampling.grammar, after_token_id=None, thoughts=None)
        compiled = self._remembered.get(key)
        if compiled is None:
            compiled = self._remembered[key] = self._start(key)
        self._remembered.move_to_end(key)
        self._waiting[name] = _Waiting(sampling, output, compiled, self._clock.now())
        self._forget_old()

    def drop(self, name: str) -> None:
        """It is not waited for any more; unknown names are not an error."""
        self._waiting.pop(name, None)

    def poll(self) -> list[tuple[str, Match | EpserveError]]:
        """Those that are compiled by now, or never will be."""
        if not self._waiting:
            return []
        news: list[tuple[str, Match | EpserveError]] = []
        now = self._clock.now()
        for name, waiting in list(self._waiting.items()):
            result = self._result(waiting) if waiting.compiled.done() else None
            if result is not None:
                news.append((name, result))
            elif now - waiting.since > COMPILE_SECONDS:
                news.append((name, _too_late(waiting.compiled)))
            else:
                continue
            del self._waiting[name]
        return news

    def close(self) -> None:
        for threads in (self._threads, self._match_threads):
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, grammar: Grammar) -> "Future[Any]":
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar", initializer=yield_to_steps)
            self._compiler = self._threads.submit(_make_compiler, *self._source)
        assert self._compiler is not None
        return self._threads.submit(_compile, self._compiler, grammar)

    def _result(self, waiting: _Waiting) -> Match | EpserveError | None:
        """None while its match is being brought to where the output is."""
        grammar = waiting.sampling.grammar
        assert grammar is not None
        assert self._compiler is not None
        error = waiting.compiled.exception()
        if error is None:
            match = waiting.match = waiting.match or self._match(waiting)
            if match.is_ready and (fault := match.fault()):
                return InvalidRequest(fault, param="grammar")
            return match if match.is_ready else None
        if isinstance(error, ValueError) and not isinstance(error, EpserveError):
            return InvalidRequest(f"the grammar is not valid: {error}", param="grammar")
        log.error("no grammar can be compiled", reason=repr(error))
        return InternalError(f"this worker cannot compile grammars: {error}")

    def _match(self, waiting: _Waiting) -> PacedMatch:
        assert self._compiler is not None
        if self._match_threads is None:
            self._match_threads = match_threads()
        match = self._compiler.result().match(
            waiting.sampling.grammar, waiting.compiled.result(), waiting.sampling.stop_token_ids
        )
        return PacedMatch(match, waiting.output, self._match_threads, self._clock)

    def _forget_old(self) -> None:
        """The least recently used ones; those under way, or that a request waits for, stay."""
        num_bytes = sum(map(_num_bytes, self._remembered.values()))
        awaited = {waiting.compiled for waiting in self._waiting.values()}
        for key, compiled in list(self._remembered.items()):
            if len(self._remembered) <= MAX_REMEMBERED and num_bytes <= MAX_REMEMBERED_BYTES:
                return
            if compiled.done():
                num_bytes -= _num_bytes(compiled)
            elif compiled in awaited or not compiled.cancel():
                continue
            del self._remembered[key]


def _too_late(compiled: "Future[Any]") -> EpserveError:
    if compiled.running() or compiled.done():
        text = f"the grammar was not compiled within {COMPILE_SECONDS:g} s"
        return InvalidRequest(text, param="grammar")
    return Overloaded(f"other grammars were compiled for {COMPILE_SECONDS:g} s")


# The results' types are those of a module that is not loaded yet.


def _make_compiler(folder: Path, vocab_size: int, eos: tuple[int, ...]) -> Any:  # noqa: ANN401
    from engine.grammar.grammar_match import GrammarCompiler

    return GrammarCompiler(folder, vocab_size, eos)


def _compile(compiler: "Future[Any]", grammar: Grammar) -> Any:  # noqa: ANN401
    return compiler.result().compile(grammar)


def _num_bytes(compiled: "Future[Any]") -> int:
    if not compiled.done() or compiled.exception() is not None:
        return 0
    return int(compiled.result().memory_size_bytes())
