"""The rank processes of one worker, as a unit: they start together and die together.

front = WorkerFront(settings, role="decode")
front.on_message = service.on_message
await front.start()                    # ranks loaded, StartError otherwise
front.send(rank, Submit(...))
reason = await front.died              # a rank is gone; the worker is to leave
await front.stop(timeout_seconds=1)    # Shutdown, then SIGKILL
"""

import asyncio
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from core.log import get_logger
from core.process import new_epoch
from core.token_file import read_token
from engine.link.link import Context
from engine.link.messages import FrontMessage, RankMessage, RankStats, Ready, Shutdown
from engine.process.rank_process import RankProcess, rank_command
from engine.process.rank_start import RankStart
from engine.process.settings import WorkerSettings

log = get_logger("engine.front")

# How often it is looked whether ranks, which speak with each step and once a second, are silent.
LOOK_SECONDS = 0.25

OnMessage = Callable[[int, RankMessage], None]
OnStats = Callable[[int, RankStats], None]
OnChange = Callable[[], None]
OnStall = Callable[[str], None]


class StartError(Exception):
    """The ranks could not be started; the message says which one and why."""


class WorkerFront:
    """All calls from the event loop's thread.

    `on_message` is called for every message of a rank but Ready, in order per rank, and must
    not block; `on_stats` after each batch; `on_change` when what a router wants to know may
    have changed; `on_stall` when a rank has ended no step for `settings.stall_seconds`, with the
    reason. All four are to be set before `start`. `died` resolves to a reason when a rank ends
    unasked; the others are killed by then.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        role: str,
        command: tuple[str, ...] = (),
    ) -> None:
        self.settings = settings
        self.role = role
        self.epoch = new_epoch()
        self.ready: tuple[Ready, ...] = ()
        self.draining = False
        self.stalled: frozenset[int] = frozenset()  # ranks that are to end a step, and do not
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.on_message: OnMessage = lambda _rank, _message: None
        self.on_change: OnChange = lambda: None
        self.on_stats: OnStats = lambda _rank, _stats: None
        self.on_stall: OnStall = lambda _reason: None
        self.slow: frozenset[int] = frozenset()  # ranks whose steps take a multiple of the usual
        self._command = command or rank_command(role)
        self._ranks: list[RankProcess] = []
        self._context = Context()
        self._reservation = socket.socket()
        self._group_secret = _group_secret(settings)
        self._folder = Path(
            tempfile.mkdtemp(prefix=f"epserve-{role}-", dir=settings.run_dir or None)
        )
        self._seen: dict[int, tuple[int, ...]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def stats(self) -> tuple[RankStats, ...]:
        """What each rank last said of itself; zeros before its first word."""
        return tuple(rank.stats for rank in self._ranks)

    @property
    def is_well(self) -> bool:
        """All ranks are up and go on from step to step."""
        return bool(self.ready) and not self.died.done() and not self.stalled

    @property
    def quiet_seconds(self) -> tuple[float, ...]:
        """Of each rank, since it last ended a step or said that it is idle."""
        return tuple(rank.quiet_seconds for rank in self._ranks)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks."""
        return tuple(rank.pid for rank in self._ranks)

    async def start(self) -> None:
        """Starts all ranks and waits until every one is ready.

        Raises StartError when one ends first, when they do not agree on what they serve, or
        after `settings.start_seconds`; `stop` is still to be called.
        """
        began = time.monotonic()
        rendezvous = self.settings.rendezvous or self._reserved_address()
        for index in range(self.settings.ranks):
            rank = RankProcess(index, self._hear, self._batch_ended)
            self._ranks.append(rank)
            try:
                await rank.start(self._context, self._start_of(index, rendezvous), self._command)
            except (OSError, zmq.ZMQError) as error:
                raise StartError(f"rank {index} cannot be started: {error}") from error
            # The rank itself has no log yet; the phases after this one it tells by itself.
            log.info("start phase begins", phase="python", rank=index, pid=rank.pid)
            rank.died.add_done_callback(self._rank_died)
        ready = await self._all_ready()
        self._reservation.close()
        _check_agreement(ready)
        self.ready = ready
        self._looking = asyncio.create_task(self._look_after_ranks(), name="stalled-ranks")
        log.info("ranks ready", num_ranks=len(ready), seconds=round(time.monotonic() - began, 2))
        self.on_change()

    def send(self, rank: int, message: FrontMessage) -> None:
        """All messages of one turn of the event loop reach the rank as one batch."""
        self._ranks[rank].send(message)

    async def stop(self, timeout_seconds: float, hurry: asyncio.Event | None = None) -> None:
        """Has all ranks leave at a step boundary, and kills those that are not gone in time, or
        when `hurry` is set (at once, where some are not ready yet and cannot listen)."""
        self._stopping = True
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        living = [rank.died for rank in self._ranks if rank.pid and not rank.died.done()]
        if living and self.ready and not self.died.done():
            for rank in self._ranks:
                rank.send(Shutdown())
            await _all_done(living, timeout_seconds, hurry or asyncio.Event())
        for rank in self._ranks:
            rank.kill()
        # NOTE: one by one: a gather that is cancelled on the way reports what was not asked for.
        for rank in self._ranks:
            await rank.close()
        self._reservation.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _reserved_address(self) -> str:
        """A loopback address that no other process is given before rank 0 listens there: a socket
        bound with SO_REUSEADDR keeps it from everyone who does not ask for this very one."""
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reservation.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{self._reservation.getsockname()[1]}"

    async def _all_ready(self) -> tuple[Ready, ...]:
        seconds = self.settings.start_seconds
        deadline = time.monotonic() + seconds
        missing: set[asyncio.Future[Any]] = {rank.ready for rank in self._ranks}
        while missing:
            done, _ = await asyncio.wait(
                {self.died, *missing},
                timeout=max(0.0, deadline - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self.died in done:
                raise StartError(self.died.result())
            if not done:
                late = [rank.index for rank in self._ranks if rank.ready in missing]
                raise StartError(f"ranks {late} are not ready after {seconds:g} s")
            missing -= done
        return tuple(rank.ready.result() for rank in self._ranks)

    async def _look_after_ranks(self) -> None:
        """Sees which ranks end no steps, and kills those that will not. What a front that was held
        up itself has not heard is no rank's silence."""
        loop = asyncio.get_running_loop()
        stall_seconds = self.settings.stall_seconds
        # A group notices by itself who keeps it waiting, and knows better which rank it is.
        most = self.settings.step_timeout_seconds + stall_seconds
        before = loop.time()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = loop.time()
            for rank in self._ranks:
                rank.quiet_seconds += min(now - before, 2 * LOOK_SECONDS)
                if rank.quiet_seconds > most:
                    rank.kill(f"it has ended no step for {most:g} s")
            before = now
            ranks = (rank for rank in self._ranks if rank.quiet_seconds > stall_seconds)
            self._note_stalled(frozenset(rank.index for rank in ranks))
            self._note_slow()

    def _note_stalled(self, stalled: frozenset[int]) -> None:
        before, self.stalled = self.stalled, stalled
        if stalled == before:
            return
        seconds = self.settings.stall_seconds
        if stalled > before:
            log.warning("ranks end no step", ranks=sorted(stalled), stall_seconds=seconds)
        if stalled and not before:
            self.on_stall(f"ranks {sorted(stalled)} have ended no step for {seconds:g} s")
        if before and not stalled:
            log.warning("ranks go on; if steps take so long, raise --stall-seconds")
        self.on_change()

    def _note_slow(self) -> None:
        before, self.slow = self.slow, frozenset(r.index for r in self._ranks if r.pace.is_slow)
        if self.slow == before:
            return
        factors = {rank.index: round(rank.pace.factor, 1) for rank in self._ranks}
        if self.slow > before:
            log.warning("steps take a multiple of their usual time", factor_of_rank=factors)
        self.on_change()

    def _start_of(self, index: int, rendezvous: str) -> RankStart:
        return RankStart(
            role=self.role,
            epoch=self.epoch,
            local_rank=index,
            rank=self.settings.node_rank * self.settings.ranks + index,
            size=self.settings.group_size,
            rendezvous=rendezvous,
            group_secret=self._group_secret,
            endpoint=f"ipc://{self._folder}/rank{index}",
            front_pid=os.getpid(),
            settings=self.settings.model_dump(mode="json"),
        )

    def _hear(self, index: int, message: RankMessage) -> None:
        self.on_message(index, message)

    def _batch_ended(self, index: int) -> None:
        stats = self._ranks[index].stats
        self.on_stats(index, stats)
        load = (
            stats.num_running,
            stats.num_waiting,
            stats.num_waiting_tokens,
            stats.pages_free,
            stats.pages_cached,
            stats.pages_quarantined,
        )
        if self._seen.get(index) != load:
            self._seen[index] = load
            self.on_change()

    def _rank_died(self, died: "asyncio.Future[str]") -> None:
        if self._stopping:
            return
        for rank in self._ranks:
            rank.kill()
        if not self.died.done():
            self.died.set_result(died.result())


async def _all_done(
    waits: "list[asyncio.Future[str]]", timeout_seconds: float, hurry: asyncio.Event
) -> None:
    """Returns when all are done, when the time is over, or when there is no time left."""
    done = asyncio.ensure_future(asyncio.wait(waits))
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait(
        {done, hurried}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED
    )
    done.cancel()
    hurried.cancel()


def _check_agreement(ready: tuple[Ready, ...]) -> None:
    for name in ("kv_fingerprint", "page_tokens", "max_model_len", "vocab_size", "eos_token_ids"):
        values = {getattr(rank, name) for rank in ready}
        if len(values) > 1:
            raise StartError(f"ranks disagree on {name}: {sorted(map(str, values))}")


def _group_secret(settings: WorkerSettings) -> str:
    """Of one node a new one; several have it from a file. Raises ValueError for a bad one."""
    if settings.nodes == 1:
        return secrets.token_hex(32)
    if settings.group_token_file is not None:
        return read_token(settings.group_token_file)
    log.warning("whoever reaches the rendezvous can join: no --group-token-file")
    return ""
