"""The Prefill service in front of ranks that are stand-ins."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core.errors import Unavailable
from engine.server.worker_metrics import WorkerMetrics
from prefill_worker.service import PrefillService
from proto import generate_pb2


def starting_service() -> PrefillService:
    """Of a worker whose ranks are still loading: nobody hears what is sent to them."""
    front: Any = SimpleNamespace(
        settings=SimpleNamespace(ranks=2, page_tokens=8), ready=(), send=lambda *_: None
    )
    return PrefillService(front, WorkerMetrics(CollectorRegistry(), "prefill", tuple))


async def test_a_worker_that_is_still_starting_knows_no_attempt_and_says_so() -> None:
    """Else the pages of those that its predecessor served wait in quarantine for its weights."""
    service = starting_service()
    context: Any = SimpleNamespace()
    abort = generate_pb2.AbortRequest(attempt_id="of the one before")
    async with asyncio.timeout(5):
        assert not (await service.Abort(abort, context)).was_known
    assert service.is_quiet
    with pytest.raises(Unavailable, match="starting"):
        await service.Prefill(generate_pb2.PrefillRequest(), context)
