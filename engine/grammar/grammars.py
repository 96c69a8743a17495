"""Grammars of requests, compiled beside the rank's loop: no step ever waits for one.

    begin(name, sampling, output)  ->  poll() ... (name, match)  or  (name, why not)

Each request has its own: compiling takes a millisecond or two, and whatever it leaves behind ends
with the request.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from core.clock import Clock
from core.errors import EpserveError, InternalError, InvalidRequest, Overloaded
from core.log import get_logger
from engine.grammar.paced_match import PacedMatch, match_threads, yield_to_steps
from engine.sampling.history import Match
from engine.sampling.sampling_params import Grammar, Sampling

if TYPE_CHECKING:  # the library is loaded in a thread
    from engine.grammar.grammar_match import GrammarCompiler, GrammarMatch

log = get_logger("engine.grammars")

# Who waits longer is told that the grammar is too much, and its thread goes on with it; or, where
# no thread has come to it, that others' are.
COMPILE_SECONDS = 20.0
NUM_THREADS = 4
# Compiled grammars wake no loop: one that waits looks this often.
GRAMMAR_POLL_SECONDS = 0.002


@dataclass(slots=True)
class _Waiting:
    output: Sequence[int]
    compiled: "Future[GrammarMatch]"
    since: float
    match: PacedMatch | None = None


class Grammars:
    """All calls from the loop's thread. The vocabulary is read at once: later it would hold up
    steps."""

    def __init__(
        self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], clock: Clock
    ) -> None:
        self._clock = clock
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar", initializer=yield_to_steps)
        self._match_threads = match_threads()
        self._compiler = self._threads.submit(_make_compiler, folder, vocab_size, eos_token_ids)
        self._waiting: dict[str, _Waiting] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def begin(self, name: str, sampling: Sampling, output: Sequence[int] = ()) -> None:
        """`poll` will tell of `name` once; `sampling` has a grammar, whose match is to be brought
        to where `output` is."""
        assert sampling.grammar is not None
        compiled = self._threads.submit(
            _compile, self._compiler, sampling.grammar, sampling.stop_token_ids
        )
        self._waiting[name] = _Waiting(output, compiled, self._clock.now())

    def drop(self, name: str) -> None:
        """It is not waited for any more; unknown names are not an error."""
        if (waiting := self._waiting.pop(name, None)) is not None:
            waiting.compiled.cancel()

    def poll(self) -> list[tuple[str, Match | EpserveError]]:
        """Those that are compiled by now, or never will be."""
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
            self.drop(name)
        return news

    def close(self) -> None:
        for threads in (self._threads, self._match_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _result(self, waiting: _Waiting) -> Match | EpserveError | None:
        """None while its match is being brought to where the output is."""
        error = waiting.compiled.exception()
        if error is None:
            match = waiting.match = waiting.match or PacedMatch(
                waiting.compiled.result(), waiting.output, self._match_threads, self._clock
            )
            if match.is_ready and (fault := match.fault()):
                return InvalidRequest(fault, param="grammar")
            return match if match.is_ready else None
        if isinstance(error, ValueError) and not isinstance(error, EpserveError):
            return InvalidRequest(f"the grammar is not valid: {error}", param="grammar")
        log.error("no grammar can be compiled", reason=repr(error))
        return InternalError(f"this worker cannot compile grammars: {error}")


def _too_late(compiled: "Future[GrammarMatch]") -> EpserveError:
    if compiled.running() or compiled.done():
        text = f"the grammar was not compiled within {COMPILE_SECONDS:g} s"
        return InvalidRequest(text, param="grammar")
    return Overloaded(f"other grammars were compiled for {COMPILE_SECONDS:g} s")


def _make_compiler(folder: Path, vocab_size: int, eos: tuple[int, ...]) -> "GrammarCompiler":
    from engine.grammar.grammar_match import GrammarCompiler

    return GrammarCompiler(folder, vocab_size, eos)


def _compile(
    compiler: "Future[GrammarCompiler]", grammar: Grammar, stop_token_ids: Sequence[int]
) -> "GrammarMatch":
    return compiler.result().match(grammar, stop_token_ids)
