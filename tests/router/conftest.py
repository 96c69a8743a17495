"""A prefill worker, a decode worker, and routers that follow them."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.running_router import RunningRouter


@pytest.fixture
async def prefill() -> AsyncIterator[FakeWorker]:
    async with FakeWorker("prefill", "p-1") as worker:
        yield worker


@pytest.fixture
async def decode() -> AsyncIterator[FakeWorker]:
    async with FakeWorker("decode", "d-1") as worker:
        yield worker


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., RunningRouter]]:
    running: list[RunningRouter] = []

    def begin(*, prefill: list[str], decode: list[str], **settings: Any) -> RunningRouter:  # noqa: ANN401 - fields of RouterSettings
        running.append(RunningRouter(prefill=tuple(prefill), decode=tuple(decode), **settings))
        return running[-1]

    yield begin
    for router in running:
        await router.close()


@pytest.fixture
async def router(
    prefill: FakeWorker, decode: FakeWorker, start: Callable[..., RunningRouter]
) -> RunningRouter:
    running = start(
        prefill=[prefill.address], decode=[decode.address], max_waiting=2, max_wait_seconds=30
    )
    await running.until_ready(prefill, decode)
    return running
