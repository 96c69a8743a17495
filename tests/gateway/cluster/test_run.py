"""A run that is stopped: its reader gets the reason, whatever it does at that moment."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from core.errors import Unavailable
from gateway.cluster.run import RequestRun
from gateway.output.choice_delta import ChoiceDelta

STOP = Unavailable("the gateway is shutting down")


class Text:
    finish_reason = None
    num_tokens = 0

    def feed(self, tokens: Any, finish: Any) -> ChoiceDelta:
        return ChoiceDelta("a", [])


class Batch:
    tokens = ()
    finish = 0


class GenerateCall:
    """A batch whenever it is let; knows when it is left."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.go = asyncio.Event()
        self.is_left = False

    async def batches(self) -> AsyncGenerator[Any]:
        try:
            while True:
                self.waiting.set()
                await self.go.wait()
                self.go.clear()
                yield Batch
        finally:
            self.is_left = True


class Choice:
    echo = None

    def __init__(self, index: int) -> None:
        self.index = index
        self.call = GenerateCall()
        self.text = Text()


def make_run(num_choices: int) -> tuple[RequestRun, list[Choice]]:
    class Nothing:
        clock = metrics = None
        tells_token_ids = tells_prompt_logprobs = False
        num_choices = 0
        prompts = ()

    nothing: Any = Nothing()
    run = RequestRun(nothing, nothing, nothing, page_tokens=0)
    choices = [Choice(index) for index in range(num_choices)]
    run._choices = choices  # type: ignore[assignment]
    return run, choices


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_reader_that_waits_is_told(num_choices: int) -> None:
    run, choices = make_run(num_choices)

    async def read() -> None:
        async with run:
            async for deltas in run:
                assert {index for index, _ in deltas} == {0}

    reading = asyncio.create_task(read())
    for _ in range(2):
        choices[0].call.waiting.clear()
        choices[0].call.go.set()
        await asyncio.wait_for(choices[0].call.waiting.wait(), 20)
    await asyncio.sleep(0)
    run.stop(STOP)
    with pytest.raises(Unavailable, match="shutting down"):
        await asyncio.wait_for(reading, 20)
    assert all(choice.call.is_left for choice in choices)
    assert not reading.cancelling()


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_reader_that_is_busy_is_told_when_it_comes_back(num_choices: int) -> None:
    run, choices = make_run(num_choices)
    async with run:
        choices[0].call.go.set()
        await anext(aiter(run))
        run.stop(STOP)
        await asyncio.sleep(0.01)  # as if it wrote to its client
        with pytest.raises(Unavailable, match="shutting down"):
            await anext(aiter(run))
    assert all(choice.call.is_left for choice in choices)


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_who_is_cancelled_and_stopped_ends_as_cancelled(num_choices: int) -> None:
    run, choices = make_run(num_choices)

    async def read() -> None:
        async with run:
            async for _ in run:
                pass

    reading = asyncio.create_task(read())
    await asyncio.wait_for(choices[0].call.waiting.wait(), 20)
    reading.cancel()
    run.stop(STOP)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(reading, 20)
    assert all(choice.call.is_left for choice in choices)
