"""Verdicts on streams, against a server that loses, repeats and refuses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from bench.serving.twins import TwinLoad, Verdict, judge
from loadgen.openai_stream import Streamed, StreamError, Target

OVERLOADED = {"error": {"message": "full", "code": "overloaded"}}


def events(text: str, *, ends: bool = True) -> bytes:
    """A stream of one letter an event."""
    choices = [{"choices": [{"text": letter, "finish_reason": None}]} for letter in text]
    lines = [f"data: {json.dumps(each)}\n\n" for each in choices]
    return "".join([*lines, "data: [DONE]\n\n" if ends else ""]).encode()


@asynccontextmanager
async def serving(answer: Callable[[], tuple[int, bytes]]) -> AsyncIterator[Target]:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        status, body = answer()
        writer.write(f"HTTP/1.1 {status} X\r\nconnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        yield Target.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_streams_are_compared_with_their_twins() -> None:
    stop = asyncio.Event()
    bodies = [
        (200, events("abcd")),  # the twin
        (200, events("abcd")),
        (200, events("abc")),
        (200, events("abccd")),
        (200, events("abxd")),
        (200, events("ab", ends=False)),
        (200, f"data: {json.dumps(OVERLOADED)}\n\n".encode()),
        (200, events("a", ends=False) + f"data: {json.dumps(OVERLOADED)}\n\n".encode()),
        (500, b""),
    ]
    answers = iter(bodies)

    def answer() -> tuple[int, bytes]:
        found = next(answers)
        if found is bodies[-1]:
            stop.set()
        return found

    async with serving(answer) as target:
        load = TwinLoad(target, "m", seed=1, num_streams=1, num_tokens=8)
        await load.learn()
        await load.run(stop)
    tally = load.tally
    assert tally.verdicts == {
        Verdict.SAME: 1,
        Verdict.REFUSED: 1,
        Verdict.LOST: 4,
        Verdict.REPEATED: 1,
        Verdict.DIFFERENT: 1,
    }
    assert len(tally.bad) == 6
    assert "lost at character 3" in tally.bad[0][1]
    assert len(tally.pauses) == len(tally.firsts) == 6


def test_who_is_turned_away_before_the_first_token_has_lost_nothing() -> None:
    twin, nothing, some = Streamed(text="ab"), Streamed(), Streamed(text="a")
    for code in ("429", "503", "overloaded", "unavailable"):
        assert judge(twin, nothing, StreamError("", code)) is Verdict.REFUSED
        assert judge(twin, some, StreamError("", code)) is Verdict.LOST
    for error in (StreamError("", "500"), ConnectionResetError(), TimeoutError()):
        assert judge(twin, nothing, error) is Verdict.LOST
    assert judge(twin, Streamed(text="ab", finish_reason="stop")) is Verdict.DIFFERENT
