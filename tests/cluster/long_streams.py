"""Many streams at once, each known from an undisturbed run; every end is compared with that."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import httpx
import jsonschema
from tokenizers import Tokenizer

from tests.cluster.event_stream import events, whole_reply
from tests.cluster.harness import DEMO_MODEL
from tests.cluster.reply_shape import canonical, same_but_for_rounding
from tests.cluster.seeded_requests import ADD, WEATHER, Fields

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
NUM_UNDISTURBED_AT_ONCE = 8
# Before a client that was refused by an event, which has no Retry-After, comes back.
REFUSED_SECONDS = 1.0


@dataclass
class LongStream:
    """One client that sends the same request again and again."""

    kind: str
    path: str
    body: Fields
    undisturbed: dict[str, Any] = field(default_factory=dict)


def _numbers(count: int) -> Fields:
    number = {"type": "integer", "minimum": 0, "maximum": 99_999}
    numbers = {"type": "array", "items": number, "minItems": count, "maxItems": count}
    properties = {"place": {"enum": ["north", "東京"]}, "numbers": numbers}
    return {
        "type": "object",
        "properties": properties,
        "required": ["place", "numbers"],
        "additionalProperties": False,
    }


def _think_id() -> int:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).token_to_id("<think>")


def _kinds(num_tokens: int) -> dict[str, Fields]:
    """Fields by kind; each kind's output is some `num_tokens` long."""
    filled = {"max_tokens": num_tokens, "ignore_eos": True}
    schema = {"name": "numbers", "schema": _numbers(num_tokens // 6)}
    sort = {"name": "sort", "parameters": _numbers(num_tokens // 6)}
    tools = [WEATHER, {"type": "function", "function": sort}, ADD]
    named = {"type": "function", "function": {"name": "sort"}}
    no_thoughts = {"logit_bias": {str(_think_id()): -100}}  # which would take some of the tokens
    return {
        "greedy": {**filled, "temperature": 0},
        "seeded": {**filled, "temperature": 0.9, "top_p": 0.95, "seed": 11},
        "JSON schema": {
            **no_thoughts,
            "max_tokens": 2 * num_tokens + 100,
            "temperature": 0.7,
            "seed": 5,
            "response_format": {"type": "json_schema", "json_schema": schema},
        },
        "tools": {
            **no_thoughts,
            "max_tokens": 2 * num_tokens + 100,
            "temperature": 0.7,
            "seed": 6,
            "tools": tools,
            "tool_choice": named,
        },
        "n=2": {**filled, "temperature": 1.0, "seed": 3, "n": 2},
        "logprobs": {**filled, "temperature": 0.6, "seed": 4, "logprobs": True, "top_logprobs": 3},
        "penalties and stops": {
            **filled,
            "temperature": 1.0,
            "seed": 9,
            "frequency_penalty": 0.1,
            "presence_penalty": 0.2,
            "repetition_penalty": 1.05,
            "logit_bias": {"40": -2},
            "stop": ["The answer is nowhere", "qqq"],
        },
    }


def long_streams(
    count: int, model: str, *, num_tokens: int, prompt_tokens: int
) -> list[LongStream]:
    """`count` streams of all kinds in turn, half of the plain ones text completions."""
    streams = []
    for index, (kind, fields) in enumerate(islice(cycle(_kinds(num_tokens).items()), count)):
        body = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        question = f"What is {1000 + 37 * index} + {91 * index}?"
        if kind in ("greedy", "seeded", "n=2") and index % 2:
            prompt = [7 + (index * 31 + position * 17) % 700 for position in range(prompt_tokens)]
            streams.append(LongStream(kind, COMPLETIONS, body | fields | {"prompt": prompt}))
        else:
            filler = "Twelve apples and three pears. " * (prompt_tokens // 12)
            messages = [
                {"role": "system", "content": f"{index} {filler}"},
                {"role": "user", "content": question},
            ]
            streams.append(LongStream(kind, CHAT, body | fields | {"messages": messages}))
    return streams


def comparable(text: str) -> dict[str, Any]:
    """A complete stream as one reply, ids and times aside."""
    return json.loads(canonical(whole_reply(events(text))))


@dataclass
class Tally:
    """What became of the streams."""

    num_running: int = 0
    num_complete: int = 0
    # Refused before the first token:
    num_turned_away: int = 0  # all workers were full
    num_told_to_wait: int = 0  # there was no pair of workers
    longest_seconds: float = 0.0
    longest_pause_seconds: float = 0.0  # between two parts of a stream
    faults: list[str] = field(default_factory=list)


class StreamPool:
    """Keeps every stream running until `stop` is set; then lets the last ones end."""

    def __init__(self, streams: list[LongStream], url: str) -> None:
        self.tally = Tally()
        self.stop = asyncio.Event()
        self._streams = streams
        self._num_ended = [0] * len(streams)
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=120, limits=limits)

    async def learn(self) -> None:
        """The undisturbed run: every request once, a few at a time."""
        gate = asyncio.Semaphore(NUM_UNDISTURBED_AT_ONCE)

        async def one(stream: LongStream) -> None:
            async with gate:
                reply = await self._client.post(stream.path, json=stream.body)
            assert reply.status_code == 200, f"{stream.kind}: {reply.text}"
            stream.undisturbed = comparable(reply.text)
            _check_kind(stream)

        await asyncio.gather(*map(one, self._streams))

    async def run(self) -> None:
        """Returns when all streams have ended after `stop`."""
        await asyncio.gather(*map(self._keep_running, range(len(self._streams))))

    async def turn_over(self, seconds: float) -> None:
        """Returns when all streams that run now have ended. TimeoutError after `seconds`."""
        before = list(self._num_ended)
        async with asyncio.timeout(seconds):
            while any(now == was for now, was in zip(self._num_ended, before, strict=True)):
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self._client.aclose()

    async def _keep_running(self, index: int) -> None:
        stream = self._streams[index]
        while not self.stop.is_set():
            begun = time.monotonic()
            try:
                await self._once(stream)
            except (AssertionError, httpx.HTTPError, ValueError, KeyError) as error:
                self.tally.faults.append(f"{stream.kind}: {type(error).__name__} {error}"[:2000])
            self._num_ended[index] += 1
            seconds = time.monotonic() - begun
            self.tally.longest_seconds = max(self.tally.longest_seconds, seconds)

    async def _once(self, stream: LongStream) -> None:
        parts: list[str] = []
        async with self._client.stream("POST", stream.path, json=stream.body) as reply:
            if reply.status_code in (429, 503):
                # Refused before it began: clients come back when they are told to.
                self.tally.num_turned_away += reply.status_code == 429
                self.tally.num_told_to_wait += reply.status_code == 503
                await asyncio.sleep(float(reply.headers["retry-after"]))
                return
            assert reply.status_code == 200, await reply.aread()
            self.tally.num_running += 1
            try:
                heard_at = time.monotonic()
                async for part in reply.aiter_text():
                    parts.append(part)
                    now = time.monotonic()
                    pause, heard_at = now - heard_at, now
                    self.tally.longest_pause_seconds = max(self.tally.longest_pause_seconds, pause)
            finally:
                self.tally.num_running -= 1
        text = "".join(parts)
        if _is_refusal(text):
            self.tally.num_turned_away += 1
            await asyncio.sleep(REFUSED_SECONDS)
            return
        got = comparable(text)
        assert same_but_for_rounding(got, stream.undisturbed), _difference(got, stream)
        self.tally.num_complete += 1


def _is_refusal(text: str) -> bool:
    """A stream of pings that ends without a token: all workers were full for too long."""
    data = [line for line in text.splitlines() if line.startswith("data: ")]
    return len(data) == 1 and '"code":"overloaded"' in data[0]


def _check_kind(stream: LongStream) -> None:
    """The undisturbed reply is of the kind that it stands for."""
    choices = stream.undisturbed["choices"]
    first = choices[0]
    if stream.kind == "JSON schema":
        schema = stream.body["response_format"]["json_schema"]["schema"]
        jsonschema.validate(json.loads(first["message"]["content"]), schema)
    if stream.kind == "tools":
        (call,) = first["message"]["tool_calls"]
        schema = stream.body["tools"][1]["function"]["parameters"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    if stream.kind == "n=2":
        assert len(choices) == 2
    if stream.kind == "logprobs":
        assert sum(len(entries or ()) for entries in first["logprobs"].values()) > 10


def _difference(got: dict[str, Any], stream: LongStream) -> str:
    left, right = json.dumps(got), json.dumps(stream.undisturbed)
    same = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), -1)
    begin = max(0, same - 100)
    return f"differs at {same}: {left[begin : same + 100]} for {right[begin : same + 100]}"
