"""The Prefill service in front of ranks that are stand-ins."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core.errors import Unavailable
from core.token_ids import pack_ids
from engine.link.messages import Abort, FrontMessage, Ready, Stopped, SubmitPrefill
from engine.server.worker_metrics import WorkerMetrics
from prefill_worker.service import PrefillService
from proto import generate_pb2
from tests.eventually import eventually


def starting_service() -> PrefillService:
    """Of a worker whose ranks are still loading: nobody hears what is sent to them."""
    front: Any = SimpleNamespace(
        settings=SimpleNamespace(ranks=2, page_tokens=8),
        ready=(),
        is_well=False,
        send=lambda *_: None,
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
    with pytest.raises(Unavailable, match="not ready"):
        await service.Prefill(generate_pb2.PrefillRequest(), context)


async def test_who_is_stalled_still_confirms_when_it_goes_on() -> None:
    """Calls end at once; that nothing is written any more, only the rank can say."""
    sent: list[FrontMessage] = []
    ready = Ready(
        rank=0, device="cpu", pid=1, kv_fingerprint="f", page_tokens=8, max_model_len=64,
        pages_total=9, max_running=4, eos_token_ids=(2,), vocab_size=100,
    )  # fmt: skip
    front: Any = SimpleNamespace(
        settings=SimpleNamespace(ranks=1, page_tokens=8, model_name="m"),
        ready=(ready,),
        is_well=True,
        draining=False,
        epoch="p",
        send=lambda _rank, message: sent.append(message),
        on_change=lambda: None,
    )
    service = PrefillService(front, WorkerMetrics(CollectorRegistry(), "prefill", tuple))
    context: Any = SimpleNamespace()
    request = generate_pb2.PrefillRequest(
        request_id="r", attempt_id="a", model="m", num_prompt_tokens=2, prefill_epoch="p",
        token_ids=pack_ids([5, 6]),
    )  # fmt: skip
    calling = asyncio.create_task(service.Prefill(request, context))
    await eventually(lambda: [type(message) for message in sent] == [SubmitPrefill])
    service.fail_all(Unavailable("worker is stalled", failed_epoch="p"))
    with pytest.raises(Unavailable, match="stalled"):
        await calling
    assert sent[1:] == [Abort(attempt_id="a")]
    stopping = asyncio.create_task(
        service.Abort(generate_pb2.AbortRequest(attempt_id="a"), context)
    )
    await eventually(lambda: len(sent) == 3)
    service.fail_all(Unavailable("worker is stalled", failed_epoch="p"))
    assert not service.is_quiet
    assert not stopping.done()
    service.on_message(0, Stopped(attempt_id="a", was_known=True))
    assert (await stopping).was_known
    assert service.is_quiet
