"""Streams whose undisturbed twins were recorded first: what disturbances do to them."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from loadgen.openai_stream import Streamed, StreamError, Target, stream
from loadgen.prompts import token_prompts

_PATH = "/v1/completions"
# Whoever has not begun may be told to come back.
_REFUSALS = ("429", "503", "overloaded", "unavailable")
_COME_BACK_SECONDS = 1.0
_LONGEST_SECONDS = 300.0
_NUM_LEARNING_AT_ONCE = 8


class Verdict(Enum):
    """Of one stream beside its twin."""

    SAME = "same"
    REFUSED = "refused"  # before its first token, with a word when to come back
    LOST = "lost"  # tokens are missing
    REPEATED = "repeated"  # there are more than there should be
    DIFFERENT = "different"  # as many, but others


def judge(twin: Streamed, got: Streamed, error: Exception | None = None) -> Verdict:
    """`got` is all that came, also of a stream that failed with `error`."""
    if error is not None:
        refused = isinstance(error, StreamError) and error.code in _REFUSALS
        return Verdict.REFUSED if refused and not got.text else Verdict.LOST
    if len(got.text) != len(twin.text):
        return Verdict.LOST if len(got.text) < len(twin.text) else Verdict.REPEATED
    same = (got.text, got.finish_reason) == (twin.text, twin.finish_reason)
    return Verdict.SAME if same else Verdict.DIFFERENT


@dataclass
class Tally:
    """`pauses` are the longest between two tokens of each stream, `firsts` the waits for its first
    one, in seconds; `bad` says what was wrong, with the time of `time.monotonic` at which that
    was seen."""

    num_tokens: int = 0
    pauses: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    verdicts: dict[Verdict, int] = field(default_factory=lambda: dict.fromkeys(Verdict, 0))
    bad: list[tuple[float, str]] = field(default_factory=list)

    def add(self, verdict: Verdict, got: Streamed) -> None:
        self.verdicts[verdict] += 1
        self.num_tokens += got.num_output_tokens
        if times := got.token_times:
            self.firsts.append(times[0] - got.sent_at)
            gaps = (after - before for before, after in zip(times, times[1:], strict=False))
            self.pauses.append(max(gaps, default=0.0))


class TwinLoad:
    """`num_streams` clients, each with a request of its own that it sends again and again."""

    def __init__(
        self, target: Target, model: str, *, seed: int, num_streams: int, num_tokens: int
    ) -> None:
        self.tally = Tally()
        self._target = target
        self._bodies = list(_bodies(model, seed, num_streams, num_tokens))
        self._twins: list[Streamed] = []

    async def learn(self) -> None:
        """The undisturbed run. Raises OSError or StreamError."""
        gate = asyncio.Semaphore(_NUM_LEARNING_AT_ONCE)

        async def one(body: dict[str, Any]) -> Streamed:
            async with gate:
                return await stream(self._target, _PATH, body, {})

        self._twins = await asyncio.gather(*map(one, self._bodies))

    async def run(self, stop: asyncio.Event) -> None:
        """Returns when all streams are over that had begun when `stop` was set."""
        await asyncio.gather(*(self._repeat(number, stop) for number in range(len(self._bodies))))

    async def _repeat(self, number: int, stop: asyncio.Event) -> None:
        while not stop.is_set():
            got = Streamed()
            error: Exception | None = None
            try:
                async with asyncio.timeout(_LONGEST_SECONDS):
                    await stream(self._target, _PATH, self._bodies[number], {}, got)
            except (OSError, StreamError) as failure:
                error = failure
            twin = self._twins[number]
            verdict = judge(twin, got, error)
            self.tally.add(verdict, got)
            if verdict not in (Verdict.SAME, Verdict.REFUSED):
                place = _first_difference(got.text, twin.text)
                what = f"stream {number} {verdict.value} at character {place}: {error!r}"
                now = time.monotonic()
                self.tally.bad.append((now, what))
            if error is not None:
                await asyncio.sleep(_COME_BACK_SECONDS)


def _first_difference(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _bodies(model: str, seed: int, count: int, num_tokens: int) -> Iterator[dict[str, Any]]:
    """Greedy, drawn, penalised and constrained ones in turn, of prompts of many lengths."""
    rng = random.Random(f"epserve-twins-{seed}")
    for number in range(count):
        drawn = {"temperature": 0.9, "top_p": 0.95, "seed": rng.randrange(2**31)}
        penalised = {"frequency_penalty": 0.3, "repetition_penalty": 1.05}
        kinds: list[dict[str, Any]] = [
            {"temperature": 0, "ignore_eos": True},
            {**drawn, "ignore_eos": True},
            {**drawn, **penalised, "ignore_eos": True},
            {**drawn, "guided_regex": rf"([0-9]{{3}} ){{{num_tokens // 6}}}[a-z]+"},
        ]
        (prompt,) = token_prompts(rng.randrange(2**31), 1, rng.choice((20, 100, 300)))
        yield {
            "model": model,
            "prompt": prompt,
            "max_tokens": rng.randint(num_tokens // 2, num_tokens),
            **kinds[number % len(kinds)],
        }
