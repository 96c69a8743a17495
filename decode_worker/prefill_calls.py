"""The calls to prefill workers, one leg an attempt, each owned until the rank is through.

    calling --OK--> delivered --first token from the rank--> over
       |                |------ connection to the peer breaks: Failed to the rank
       `--error: Failed to the rank; of a draining peer, it has stopped as well

The rank decides what a failure means: its KV may all have arrived before the peer died.
"""

import asyncio
from collections.abc import Callable

import grpc

from core import tracing
from core.clock import Clock
from core.errors import (
    Cancelled,
    ContextLengthExceeded,
    Draining,
    EpserveError,
    InternalError,
    Mismatch,
    Overloaded,
    Unavailable,
)
from core.log import get_logger
from decode_worker.call import Call
from decode_worker.call_spans import Stage
from decode_worker.prefill_message import prefill_request, prefilled_of
from decode_worker.prefill_peer import PrefillPeer, PrefillPeers
from decode_worker.quarantine import QuarantineKeeper
from engine.link.messages import (
    Failed,
    FrontMessage,
    PrefillStopped,
    Reserved,
)
from proto import generate_pb2, router_pb2
from rpc.client import Disconnected, request_metadata, to_error

log = get_logger("decode_worker.prefill_calls")

Send = Callable[[int, FrontMessage], None]
OnGone = Callable[[PrefillPeer], None]
OnDraining = Callable[[router_pb2.WorkerRef], None]


class _PrefillCall:
    """`task` runs the call; `delivered` once its result is with the rank, `has_stopped` once the
    peer has said that it writes no more."""

    def __init__(self, call: Call, peer: PrefillPeer) -> None:
        self.call = call
        self.peer = peer
        self.num_losses = peer.num_losses
        self.delivered = False
        self.has_stopped = False
        self.task: asyncio.Task[None] | None = None


class PrefillCalls:
    """`send` speaks to a rank; `on_gone` hears of peers that cannot be reached any more, whose
    legs have been failed by then, `on_draining` of those that take nothing new. All methods
    return at once."""

    def __init__(
        self,
        model: str,
        send: Send,
        on_gone: OnGone,
        on_draining: OnDraining,
        lease_seconds: float,
        clock: Clock,
    ) -> None:
        self._model = model
        self._on_gone = on_gone
        self._on_draining = on_draining
        self._send = send
        self._clock = clock
        self._peers = PrefillPeers(self._lost)
        self._keeper = QuarantineKeeper(self._peers, self._stopped, lease_seconds, clock)
        self._prefill_calls: dict[str, _PrefillCall] = {}  # by attempt id

    @property
    def num_open(self) -> int:
        """Legs and quarantines."""
        return len(self._prefill_calls) + self._keeper.num_kept

    def is_gone(self, address: str, epoch: str) -> bool:
        """That worker was lost, and nothing has been heard from its address since."""
        peer = self._peers.find(address)
        return peer is not None and epoch in peer.gone_epochs

    def begin(self, call: Call, reserved: Reserved) -> None:
        """Has the call's prefill worker fill what was reserved."""
        prefill_call = _PrefillCall(call, self._peers.borrow(call.prefill.address))
        self._prefill_calls[reserved.attempt_id] = prefill_call
        call.attempt_id = reserved.attempt_id
        call.prefill_error = None
        name = f"prefill-{reserved.attempt_id}"
        prefill_call.task = asyncio.create_task(self._drive(prefill_call, reserved), name=name)

    def end(self, call: Call) -> None:
        """Cancels the call's leg: no one waits for it. The prefill worker takes a cancelled
        call for an abort."""
        prefill_call = self._prefill_calls.get(call.attempt_id)
        if prefill_call is not None and prefill_call.task is not None:
            prefill_call.task.cancel()

    def over(self, call: Call) -> bool:
        """The rank is through with the call's attempt: its KV is complete, or given up. False
        when that was said before."""
        if call.attempt_id not in self._prefill_calls:
            return False
        self._drop(call.attempt_id)
        return True

    def quarantined(self, rank: int, attempt_id: str) -> None:
        """The rank holds pages back until the attempt has stopped."""
        prefill_call = self._prefill_calls.get(attempt_id)
        if prefill_call is None:
            # Its Reserved came too late to be acted on: no worker was ever asked to write.
            self._stopped(rank, attempt_id)
            return
        if prefill_call.has_stopped:
            self._stopped(rank, attempt_id)
        else:
            self._keeper.keep(rank, attempt_id, prefill_call.peer.address)
        self._drop(attempt_id)

    async def close(self) -> None:
        """Ends all calls and channels."""
        tasks = [
            prefill_call.task
            for prefill_call in self._prefill_calls.values()
            if prefill_call.task is not None
        ]
        for attempt_id in list(self._prefill_calls):
            self._drop(attempt_id)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._keeper.close()
        await self._peers.close()

    def _drop(self, attempt_id: str) -> None:
        prefill_call = self._prefill_calls.pop(attempt_id)
        if prefill_call.task is not None:
            prefill_call.task.cancel()
        self._peers.give_back(prefill_call.peer)

    def _stopped(self, rank: int, attempt_id: str) -> None:
        self._send(rank, PrefillStopped(attempt_id=attempt_id))

    def _lost(self, peer: PrefillPeer) -> None:
        for attempt_id, prefill_call in list(self._prefill_calls.items()):
            if prefill_call.peer is peer and prefill_call.delivered:
                self._fail(prefill_call, attempt_id, lost_error(prefill_call.call.prefill))
        self._on_gone(peer)

    async def _ask(
        self, prefill_call: _PrefillCall, reserved: Reserved
    ) -> generate_pb2.PrefillResponse:
        call = prefill_call.call
        timeout = None if call.deadline is None else max(0.0, call.deadline - self._clock.now())
        with tracing.begin("prefill", tracing.Kind.CLIENT, parent=call.spans.parent) as span:
            if span.is_recording:
                attributes = {
                    "epserve.prefill": call.prefill.name,
                    "server.address": prefill_call.peer.address,
                }
                span.note(attributes)
            return await prefill_call.peer.stub.Prefill(
                prefill_request(call, reserved, self._model),
                timeout=timeout,
                metadata=request_metadata(call.traced_id, span.context),
            )

    async def _drive(self, prefill_call: _PrefillCall, reserved: Reserved) -> None:
        try:
            await self._run(prefill_call, reserved)
        except Exception:
            # A defect, ours or the peer's: nothing else would ever end the request.
            log.exception(
                "prefill failed unexpectedly",
                request_id=prefill_call.call.traced_id,
                id=prefill_call.call.request_id,
            )
            error = InternalError("internal error; the log of the decode worker has the details")
            self._fail(prefill_call, reserved.attempt_id, error)

    async def _run(self, prefill_call: _PrefillCall, reserved: Reserved) -> None:
        call, attempt_id = prefill_call.call, reserved.attempt_id
        try:
            reply = await self._ask(prefill_call, reserved)
        except grpc.aio.AioRpcError as error:
            meant = _meant(error, call)
            prefill_call.has_stopped = isinstance(meant, Draining)
            self._fail(prefill_call, attempt_id, meant)
            if prefill_call.has_stopped:
                self._on_draining(call.prefill)
            if error.code() is grpc.StatusCode.UNAVAILABLE and not prefill_call.peer.connected:
                self._on_gone(prefill_call.peer)
            return
        if call.request.sampling.max_tokens and not reply.HasField("first_token"):
            self._fail(prefill_call, attempt_id, InternalError("prefill answered without a token"))
            return
        if not call.num_sent_tokens:
            call.num_cached_tokens = reply.num_cached_tokens
            # A request that was put back has had them with its first prefill.
            call.prompt_logprobs = list(reply.prompt_logprobs) or call.prompt_logprobs
        prefilled = prefilled_of(call.key, attempt_id, reply)
        call.record.note_prefill(prefilled)
        call.spans.enter(Stage.WAIT_FOR_KV)
        self._send(call.rank, prefilled)
        prefill_call.delivered = True
        if prefill_call.num_losses != prefill_call.peer.num_losses:
            self._fail(prefill_call, attempt_id, lost_error(call.prefill))

    def _fail(self, prefill_call: _PrefillCall, attempt_id: str, error: EpserveError) -> None:
        call = prefill_call.call
        call.prefill_error = error
        log.info(
            "prefill failed",
            request_id=call.traced_id,
            id=call.request_id,
            peer=prefill_call.peer.address,
            code=error.status.grpc,
            reason=error.message,
        )
        self._send(
            call.rank,
            Failed(
                request_id=call.key,
                attempt_id=attempt_id,
                code=error.status.grpc,
                message=error.message,
            ),
        )


def lost_error(prefill: router_pb2.WorkerRef) -> Unavailable:
    """The prefill worker is, to all appearances, dead."""
    return Unavailable(
        f"connection to prefill worker {prefill.name} was lost", failed_epoch=prefill.epoch
    )


def draining_error(prefill: router_pb2.WorkerRef) -> Draining:
    """The prefill worker takes no new requests."""
    return Draining(f"prefill worker {prefill.name} is draining", failed_epoch=prefill.epoch)


def _meant(error: grpc.aio.AioRpcError, call: Call) -> EpserveError:
    """What it means for the Generate call that its prefill ended like this."""
    meant = to_error(error, peer_epoch=call.prefill.epoch)
    if isinstance(meant, Disconnected):
        return lost_error(call.prefill)
    is_refusal = isinstance(meant, Overloaded | ContextLengthExceeded)
    refused_late = is_refusal and call.num_sent_tokens > 0
    # Cancelled by its server, which is leaving. Refused late: put back by preemption, it has
    # begun to answer and has to carry on elsewhere; it may have grown too long for this one.
    if refused_late or isinstance(meant, Cancelled):
        return Unavailable(meant.message, failed_epoch=call.prefill.epoch)
    if isinstance(meant, Unavailable | Mismatch) and not meant.failed_epoch:
        meant.failed_epoch = call.prefill.epoch
    return meant
