"""What requests that are meant to be dear do to others: the worst gap of plain streams beside them.

    python -m bench.nasty_requests --record

A demo cluster on this machine's CPU. Eight plain streams run at a time; beside them each kind of
nasty request is sent, several at once and again as soon as they are answered. The worst gap between
two tokens of any of the eight is compared with that of a quiet round just before. Fails where it is
more than twice that and more than half a second.
"""

import argparse
import asyncio
import json
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import httpx

from bench.records import bench_parser, path_of, report
from bench.serving.local_cluster import local_cluster
from bench.serving.raw_streams import KeptConnections, RawStream
from loadgen.records import BenchRun

BENCH = "nasty_requests"
NUM_STREAMS = 8
NUM_AT_ONCE = 4  # nasty ones
MOST_RATIO, MOST_SECONDS = 2.0, 0.5
ANSWER_SECONDS = 60.0
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"

Body = dict[str, Any]


def constraints() -> Iterator[tuple[str, Body]]:
    """Fields of a request that make its matcher, or its compiler, work."""
    for inside in (30, 100, 300):
        yield (
            f"regex of nested repeats, {inside}",
            {"guided_regex": f"(.{{1,{inside}}}){{1,{inside}}}"},
        )
    yield "regex of a long tail", {"guided_regex": ".{0,1000}.*x.{500}"}
    yield "regex of many words", {"guided_regex": "(?:[a-z ]{1,90}){1,90}!"}
    yield "regex of nested stars", {"guided_regex": "((a*)*)*|([a-z ]+)+!"}
    yield "regex that counts far", {"guided_regex": "[a-z ]{1,2000}"}
    yield "grammar of two roots", {"guided_grammar": "root ::= root root | [a-z ]*"}
    yield "grammar of threes", {"guided_grammar": "root ::= s\ns ::= s s | s s s | [a-z ]"}
    both = 'root ::= "" | [a-z ] root [a-z ] | [a-z ] root | root [a-z ]'
    yield "grammar of both ends", {"guided_grammar": both}
    # Harmless until the model has said a word: what is tried before knows nothing of it.
    late = 'root ::= [a-z]{1,3} "." | [A-Z] s\ns ::= s s | s s s | [a-zA-Z ,.]'
    yield "grammar that is ambiguous late", {"guided_grammar": late}
    pattern = {"type": "string", "pattern": "^(.{1,30}){1,30}$"}
    yield "schema with a nested pattern", {"guided_json": pattern}
    yield "schema of a long string", {"guided_json": {"type": "string", "maxLength": 100_000}}
    lengths = [{"type": "string", "maxLength": length} for length in range(1, 120)]
    yield "schema of many unions", {"guided_json": {"type": "array", "items": {"anyOf": lengths}}}
    names = {f"p{number}": {"type": "string"} for number in range(2000)}
    yield "schema of 2,000 names", {"guided_json": {"type": "object", "properties": names}}
    deep: Body = {"type": "string"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    yield "schema of 60 levels", {"guided_json": deep}
    yield "choice of 1,024 texts", {"guided_choice": [f"{n} " + "a" * 200 for n in range(1024)]}


def others() -> Iterator[tuple[str, Body]]:
    """Fields that make a rank's sampling, or the gateway's text, work."""
    yield "700 biases", {"logit_bias": {str(token): -1 for token in range(700)}}
    yield "16 stop strings of 1,024", {"stop": ["a" * 1023 + chr(97 + n) for n in range(16)]}
    yield "128 stop tokens", {"stop_token_ids": list(range(100, 228))}
    yield "20 best tokens each", {"logprobs": True, "top_logprobs": 20}
    yield "all penalties", {
        "frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 1.1, "temperature": 1,
    }  # fmt: skip
    yield "many choices", {"n": 16, "temperature": 1}
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20)}}
    tools = [
        {"type": "function", "function": {"name": f"tool{n}", "parameters": schema}}
        for n in range(128)
    ]
    yield "128 tools", {"tools": tools}
    yield "one of 128 tools, forced", {"tools": tools, "tool_choice": "required"}
    turns = [{"role": role, "content": "a"} for _ in range(500) for role in ("user", "assistant")]
    yield "history of 1,000 turns", {"messages": [*turns, {"role": "user", "content": "a"}]}
    parts = [{"type": "text", "text": "a"}] * 1000
    yield "message of 1,000 parts", {"messages": [{"role": "user", "content": parts}]}
    yield "message of 1 MB", {"messages": [{"role": "user", "content": "word " * 200_000}]}
    yield "message without spaces", {"messages": [{"role": "user", "content": "a" * 300_000}]}
    emoji = "\U0001f469\u200d\U0001f680" * 300
    yield "message of emoji", {"messages": [{"role": "user", "content": emoji}]}
    levels: Any = "a"
    for _ in range(60):
        levels = [levels]
    yield "metadata of 60 levels", {"metadata": {"a": levels}}


def body(fields: Body, max_tokens: int) -> Body:
    message = {"role": "user", "content": "Tell me a story."}
    return {"messages": [message], "max_tokens": max_tokens, "ignore_eos": True, **fields}


class Rounds:
    """At one cluster."""

    def __init__(self, url: str, num_tokens: int) -> None:
        self._url = url
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
            self._model = json.load(reply)["data"][0]["id"]
        self._num_tokens = num_tokens

    async def gap(self, fields: Body | None, address: str = "") -> tuple[float, str]:
        """Seconds, the worst between two tokens of a plain stream beside requests with `fields`
        from `address`, and the status of the last of these. Raises RuntimeError for a stream that
        broke off."""
        host, _, port = self._url.removeprefix("http://").partition(":")
        connections = KeptConnections((host, int(port)))
        plain = body({"model": self._model, "stream": True, "temperature": 0}, self._num_tokens)
        streams = [RawStream(CHAT, plain) for _ in range(NUM_STREAMS)]
        for stream in streams:
            await connections.send(stream)
        nasty = [
            asyncio.create_task(self._ask(fields, address)) for _ in range(NUM_AT_ONCE) if fields
        ]
        said = ["-"]
        try:
            for stream in streams:
                await stream.ended
        finally:
            for task in nasty:
                task.cancel()
            said += await asyncio.gather(*nasty)
        if not all(stream.is_complete for stream in streams):
            raise RuntimeError(f"a plain stream broke off: {streams[0].tail()}")
        return max(_worst_gap(stream) for stream in streams), said[-1]

    async def _ask(self, fields: Body | None, address: str) -> str:
        """Again and again, until it is cancelled."""
        said = "unanswered"
        asked = body({"model": self._model, **(fields or {})}, self._num_tokens)
        transport = httpx.AsyncHTTPTransport(local_address=address)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=ANSWER_SECONDS, transport=transport
        ) as client:
            try:
                while True:
                    reply = await client.post(CHAT, json=asked)
                    said = str(reply.status_code)
                    await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                return said


def _worst_gap(stream: RawStream) -> float:
    """The wait for the first token is one: all of them may come at once after it."""
    times = [stream.sent_at, *stream.arrivals()[1]]
    return max(late - early for early, late in zip(times, times[1:], strict=False))


class Measured(NamedTuple):
    """Seconds between two tokens, at worst."""

    case: str
    quiet: float
    beside: float


async def measure(url: str, arguments: argparse.Namespace) -> list[Measured]:
    rounds = Rounds(url, arguments.tokens)
    await rounds.gap(None)
    measured = []
    for number, (name, fields) in enumerate((*constraints(), *others())):
        if arguments.only in name:
            quiet, _ = await rounds.gap(None)
            # Clients are told apart by their addresses: who was nasty before must not matter.
            beside, said = await rounds.gap(fields, f"127.0.1.{number + 1}")
            sys.stderr.write(f"{name}: {beside:.3f} s, quiet {quiet:.3f} s, answered {said}\n")
            measured.append(Measured(name, quiet, beside))
    return measured


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--only", default="", help="kinds with this in their names")
    arguments = parser.parse_args(argv)
    run = BenchRun.begin(BENCH, on_cpu=True)
    with local_cluster() as url:
        measured = asyncio.run(measure(url, arguments))
    records = (
        run.record(one.case, "worst_gap", "s", one.beside, peer="quiet", peer_value=one.quiet)
        for one in measured
    )
    report(records, path_of(BENCH, arguments))
    late = [one.case for one in measured if one.beside > max(MOST_SECONDS, MOST_RATIO * one.quiet)]
    if late:
        sys.stderr.write(f"streams were held up by: {', '.join(late)}\n")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
