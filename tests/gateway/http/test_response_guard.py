"""Work that is ended early: by whom, and what its task is told."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from core.clock import SystemClock
from core.errors import DeadlineExceeded
from gateway.http.reply_sender import ReplySender
from gateway.http.response_guard import Bounds, ResponseGuard
from tests.eventually import eventually


class Connection:
    """Remembers who wants to be told."""

    def __init__(self) -> None:
        self.on_lost: Callable[[], None] | None = None
        self.is_cut = False

    def watch(self, on_lost: Callable[[], None], ping: Callable[[], None]) -> None:
        self.on_lost, self.ping = on_lost, ping

    def unwatch(self, on_lost: Callable[[], None]) -> None:
        assert self.on_lost == on_lost
        self.on_lost = None

    def abort(self) -> None:
        self.is_cut = True


class Client:
    """Reads when it is let."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Any) -> None:  # noqa: ANN401 - as ASGI has it
        self.messages.append(message)
        await self.reads.wait()


class Scene:
    def __init__(self, *, seconds: float = 60, pings: float = 0, stall: float = 60) -> None:
        self.connection = Connection()
        self.client = Client()
        clock = SystemClock()
        self.sender = ReplySender(self.client.send, clock)
        bounds = Bounds(clock.now() + seconds, pings, stall)
        connection: Any = self.connection
        self.response_guard = ResponseGuard(connection, self.sender, bounds, clock)


async def test_a_client_that_leaves() -> None:
    scene = Scene()
    with scene.response_guard as response_guard:
        assert scene.connection.on_lost is not None
        asyncio.get_running_loop().call_soon(scene.connection.on_lost)
        await asyncio.Event().wait()
    assert response_guard.outcome == "disconnected"
    assert scene.connection.on_lost is None
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_who_is_cancelled_as_well_ends_as_cancelled() -> None:
    began = asyncio.Event()
    scenes: list[Scene] = []

    async def work() -> None:
        scenes.append(Scene())
        with scenes[0].response_guard:
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.wait_for(began.wait(), 20)
    assert scenes[0].connection.on_lost is not None
    scenes[0].connection.on_lost()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)


async def test_a_deadline_is_an_error_until_something_was_sent() -> None:
    with pytest.raises(DeadlineExceeded), Scene(seconds=0.01).response_guard:
        await asyncio.Event().wait()
    scene = Scene(seconds=0.05)
    with scene.response_guard as response_guard:
        await scene.sender.events(b"data: a\n\n")
        await asyncio.Event().wait()
    assert response_guard.outcome == "deadline_exceeded"
    assert scene.connection.is_cut


async def test_a_client_that_does_not_read_and_pings_in_front_of_it() -> None:
    scene = Scene(pings=0.01, stall=0.1)
    scene.sender.begin_work()
    with scene.response_guard as response_guard:
        async with asyncio.timeout(20):
            while len(scene.client.messages) < 4:  # the head, then comments
                await asyncio.sleep(0.005)
        scene.client.reads.clear()
        await scene.sender.events(b"data: a\n\n")
    await scene.sender.close()
    assert response_guard.outcome == "slow_reader"
    assert scene.connection.is_cut
    heads = [one for one in scene.client.messages if one["type"] == "http.response.start"]
    assert len(heads) == 1
    assert {one["body"] for one in scene.client.messages if "body" in one} >= {b": ping\n\n"}


async def test_work_that_ends_by_itself() -> None:
    scene = Scene(pings=0.01)
    with scene.response_guard as response_guard:
        pass
    assert response_guard.outcome is None
    with pytest.raises(ValueError, match="its own"), scene.response_guard:
        raise ValueError("its own")
    other = Scene(pings=0.01)
    other.sender.begin_work()
    with other.response_guard:
        await eventually(lambda: len(other.client.messages) >= 4)
    assert not scene.client.messages  # the timer is gone
