"""Load on an OpenAI-compatible server: so many at once, or so many a second."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from loadgen.openai_stream import Streamed, StreamError, Target, stream
from loadgen.prompts import arrival_times, chat_prompts, token_prompts

Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """One run. Either `concurrency` requests are kept running (closed loop), or requests
    arrive at `request_rate` a second, Poisson, however many that makes at once (open loop)."""

    url: str
    model: str
    endpoint: Endpoint = "completions"
    concurrency: int = 1
    request_rate: float | None = None
    num_prompts: int = 32
    prompt_tokens: int = 128  # chat: words
    output_tokens: int = 64
    shared_prefix_tokens: int = 0
    seed: int = 0
    timeout_seconds: float = 600.0
    api_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request, seconds throughout; `error` is empty for a success."""

    index: int
    started_at_seconds: float  # since the start of the run
    error: str = ""
    ttft_seconds: float = 0.0
    e2e_seconds: float = 0.0
    inter_token_seconds: tuple[float, ...] = ()  # between events; one may carry several tokens
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""

    @property
    def tpot_seconds(self) -> float:
        """Time per output token after the first."""
        return (self.e2e_seconds - self.ttft_seconds) / max(1, self.num_output_tokens - 1)


def bodies(options: LoadOptions) -> list[dict[str, Any]]:
    """Request bodies: greedy, of exactly `output_tokens` where the server knows ignore_eos."""
    shared = {
        "model": options.model,
        "max_tokens": options.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    if options.endpoint == "chat":
        texts = chat_prompts(options.seed, options.num_prompts, options.prompt_tokens)
        return [{**shared, "messages": [{"role": "user", "content": text}]} for text in texts]
    prompts = token_prompts(
        options.seed,
        options.num_prompts,
        options.prompt_tokens,
        shared_prefix_tokens=options.shared_prefix_tokens,
    )
    return [{**shared, "prompt": prompt} for prompt in prompts]


async def run_load(
    options: LoadOptions, on_done: Callable[[Outcome], None] = lambda _outcome: None
) -> tuple[list[Outcome], float]:
    """All outcomes in order of the requests, and the seconds that the run took.

    A request that fails is an outcome with an error; nothing is tried twice.
    Raises ValueError for options that make no sense.
    """
    if options.concurrency < 1:
        raise ValueError(f"a concurrency of {options.concurrency}")
    load = _Load(options, Target.parse(options.url), on_done)
    everything = bodies(options)
    load.began = time.perf_counter()
    if options.request_rate is None:
        queue = iter(enumerate(everything))

        async def client() -> list[Outcome]:
            return [await load.request(index, body) for index, body in queue]

        clients = [client() for _ in range(min(options.concurrency, len(everything)))]
        outcomes = [outcome for part in await asyncio.gather(*clients) for outcome in part]
    else:
        times = arrival_times(options.seed, len(everything), options.request_rate)
        outcomes = await asyncio.gather(
            *(
                load.request_at(index, body, at)
                for index, (body, at) in enumerate(zip(everything, times, strict=True))
            )
        )
    seconds = time.perf_counter() - load.began
    return sorted(outcomes, key=lambda outcome: outcome.index), seconds


class _Load:
    def __init__(
        self, options: LoadOptions, target: Target, on_done: Callable[[Outcome], None]
    ) -> None:
        self.began = 0.0
        self._options = options
        self._target = target
        self._on_done = on_done
        self._path = f"/v1/{'chat/' if options.endpoint == 'chat' else ''}completions"
        key = options.api_key
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    async def request_at(self, index: int, body: Mapping[str, Any], at: float) -> Outcome:
        await asyncio.sleep(self.began + at - time.perf_counter())
        return await self.request(index, body)

    async def request(self, index: int, body: Mapping[str, Any]) -> Outcome:
        started_at = time.perf_counter() - self.began
        try:
            async with asyncio.timeout(self._options.timeout_seconds):
                streamed = await stream(self._target, self._path, body, self._headers)
            outcome = _success(index, started_at, streamed)
        except (StreamError, OSError) as error:  # TimeoutError is an OSError
            reason = str(error) or type(error).__name__
            outcome = Outcome(index=index, started_at_seconds=started_at, error=reason)
        self._on_done(outcome)
        return outcome


def _success(index: int, started_at: float, streamed: Streamed) -> Outcome:
    times = streamed.token_times
    if not times:
        raise StreamError("the answer has no token")
    return Outcome(
        index=index,
        started_at_seconds=started_at,
        ttft_seconds=times[0] - streamed.sent_at,
        e2e_seconds=streamed.finished_at - streamed.sent_at,
        inter_token_seconds=tuple(b - a for a, b in zip(times, times[1:], strict=False)),
        num_prompt_tokens=streamed.num_prompt_tokens,
        num_cached_tokens=streamed.num_cached_tokens,
        num_output_tokens=streamed.num_output_tokens or len(times),
        text=streamed.text,
    )
