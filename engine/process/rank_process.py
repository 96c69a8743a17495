"""One rank of a worker as its front sees it: a child process and the link to it."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from core.log import get_logger
from engine.link.link import Context, FrontLink, LinkError
from engine.link.messages import Failed, FrontMessage, RankBatch, RankMessage, RankStats, Ready
from engine.process.rank_start import RankStart
from engine.process.step_pace import StepPace

log = get_logger("engine.rank_process")


class RankProcess:
    """Spawned by `start`; dead for good once `died` is set, with the reason as its result.

    The rank's stderr is the front's, so that its traces are in the worker's log. A rank that
    cannot start says why in a `Failed` without request id before it leaves.
    """

    def __init__(
        self,
        index: int,
        on_message: Callable[[int, RankMessage], None],
        on_batch_end: Callable[[int], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.index = index
        self.stats = RankStats()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.died: asyncio.Future[str] = loop.create_future()
        self._on_message = on_message
        self._on_batch_end = on_batch_end
        self.quiet_seconds = 0.0  # since it last ended a step, or said that it is idle
        self.pace = StepPace()
        self._reason = ""
        self._process: asyncio.subprocess.Process | None = None
        self._link: FrontLink | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, context: Context, start: RankStart, command: tuple[str, ...]) -> None:
        """Binds the link, then starts the process. Raises OSError when that is impossible."""
        self._link = FrontLink(context, start.endpoint, self._hear, self._link_failed)
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, **start.to_environment()},
            cwd=Path(__file__).parents[2],
        )
        self._watch = asyncio.create_task(self._wait_for_exit(), name=f"rank-{self.index}-exit")

    @property
    def pid(self) -> int:
        """0 before the start."""
        return self._process.pid if self._process is not None else 0

    def send(self, message: FrontMessage) -> None:
        """Queued for the rank; dropped when it is dead."""
        if self._link is not None:
            self._link.send(message)

    def kill(self, reason: str = "") -> None:
        """SIGKILL, unless it is dead already; `reason` is told with its death."""
        if self._process is not None and self._process.returncode is None:
            self._reason = self._reason or reason
            self._process.kill()

    async def close(self) -> None:
        """Kills the process if need be and waits for its end."""
        self.kill()
        if self._watch is not None:
            await self._watch
        if self._link is not None:
            self._link.close()

    def _hear(self, batch: RankBatch) -> None:
        assert batch.rank == self.index, f"rank {self.index} calls itself {batch.rank}"
        self.stats = batch.stats
        self.quiet_seconds = 0.0
        self.pace.note(batch.stats.step_seconds, batch.stats.step_tokens)
        for message in batch.messages:
            if isinstance(message, Ready) and not self.ready.done():
                self.ready.set_result(message)
            elif isinstance(message, Failed) and not message.request_id:
                self._reason = message.message
            else:
                self._tell(message)
        self._on_batch_end(self.index)

    def _tell(self, message: RankMessage) -> None:
        try:
            self._on_message(self.index, message)
        except Exception as error:
            # Its request would hang for ever: better a worker that starts anew.
            self.kill(f"{type(message).__name__} cannot be handled: {error!r}")
            raise

    def _link_failed(self, error: LinkError) -> None:
        self.kill(str(error))

    async def _wait_for_exit(self) -> None:
        assert self._process is not None
        status = await self._process.wait()
        # What the rank said before it died is still in the socket.
        await asyncio.sleep(0)
        how = f"signal {-status}" if status < 0 else f"status {status}"
        reason = f"rank {self.index} (pid {self._process.pid}) ended with {how}"
        if self._reason:
            reason += f": {self._reason}"
        self.died.set_result(reason)


def rank_command(role: str) -> tuple[str, ...]:
    """The command line of a rank process of `role`."""
    return (sys.executable, "-m", f"{role}_worker.rank")
