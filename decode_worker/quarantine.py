"""Makes sure that a prefill worker has stopped writing before its pages are used again.

For every quarantined attempt a task asks `Prefill.Abort` until one of these is true:

    it answers              the worker confirms, or is another process at the same address
    it cannot be reached    for the whole lease, and there is no process any more: by then the
                            worker has fenced itself off, where its host or the network is gone

While the worker is connected but does not confirm, the pages stay where they are, and also while
it is frozen: it would go on with what it was writing.
"""

import asyncio
from collections.abc import Callable

import grpc

from core.clock import Clock
from core.log import get_logger
from decode_worker.prefill_peer import PrefillPeer, PrefillPeers
from proto import generate_pb2

log = get_logger("decode_worker.quarantine")

ABORT_TIMEOUT_SECONDS = 2.0
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 0.5
# Who is there confirms within a step.
LATE_SECONDS = 5.0


class QuarantineKeeper:
    """`released(rank, attempt_id)` is called once for each `keep`, unless closed before."""

    def __init__(
        self,
        peers: PrefillPeers,
        released: Callable[[int, str], None],
        lease_seconds: float,
        clock: Clock,
    ) -> None:
        self._peers = peers
        self._released = released
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def num_kept(self) -> int:
        return len(self._tasks)

    def keep(self, rank: int, attempt_id: str, address: str) -> None:
        """Starts to ask the worker at `address` to stop `attempt_id`."""
        assert attempt_id not in self._tasks, attempt_id
        task = asyncio.create_task(self._drive(rank, attempt_id, address), name=f"q-{attempt_id}")
        self._tasks[attempt_id] = task

    async def close(self) -> None:
        """Gives up on what is left; the rank's memory is about to go away."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _drive(self, rank: int, attempt_id: str, address: str) -> None:
        peer = self._peers.borrow(address)
        began = self._clock.now()
        try:
            how = await self._until_stopped(peer, attempt_id)
        finally:
            self._peers.give_back(peer)
        seconds = round(self._clock.now() - began, 3)
        log.info("prefill stopped", attempt=attempt_id, peer=address, how=how, seconds=seconds)
        del self._tasks[attempt_id]
        self._released(rank, attempt_id)

    async def _until_stopped(self, peer: PrefillPeer, attempt_id: str) -> str:
        request = generate_pb2.AbortRequest(attempt_id=attempt_id)
        began, is_told = self._clock.now(), False
        unreachable_since: float | None = None
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                reply = await peer.stub.Abort(request, timeout=ABORT_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            else:
                return "confirmed" if reply.was_known else "unknown there"
            now = self._clock.now()
            if peer.connected:
                unreachable_since = None
            elif unreachable_since is None:
                unreachable_since = now
            elif now - unreachable_since >= self._lease_seconds and not await peer.is_there():
                return "lease over"
            if not is_told and now - began >= LATE_SECONDS:
                is_told = True
                log.warning(
                    "prefill does not confirm that it has stopped; its pages are kept",
                    attempt=attempt_id,
                    peer=peer.address,
                    connected=peer.connected,
                    reason=reason,
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
