"""Ends the work on a response early: with its client, at its deadline, or for want of a reader.

    with ResponseGuard(connection, sender, bounds) as guard:
        ...                                     # in the task that answers the request
    guard.outcome                               # why it was ended, if it was

Callbacks of connection and timer instead of tasks beside the work: those would be a tenth of
what a short request costs.
"""

import asyncio
from types import TracebackType
from typing import NamedTuple, Self

from core.clock import Clock
from core.errors import STATUS, DeadlineExceeded
from core.log import get_logger
from gateway.http.http_protocol import HttpProtocol
from gateway.http.reply_sender import ReplySender

log = get_logger("gateway.response_guard")

TOO_LATE = STATUS[DeadlineExceeded].code


class Bounds(NamedTuple):
    """`give_up_at` is on the clock; `ping_seconds` 0: no pings."""

    give_up_at: float
    ping_seconds: float
    reader_stall_seconds: float


class ResponseGuard:
    """The block is cancelled when its work is to end, and that is as good an end of it as any:
    nothing is raised, but for DeadlineExceeded while the client has got nothing."""

    def __init__(
        self, connection: HttpProtocol, sender: ReplySender, bounds: Bounds, clock: Clock
    ) -> None:
        self.outcome: str | None = None
        self._connection = connection
        self._sender = sender
        self._bounds = bounds
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer: asyncio.TimerHandle

    def __enter__(self) -> Self:
        self._connection.watch(self._on_lost, self._sender.ping)
        self._wait(self._clock.now())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._connection.unwatch(self._on_lost)
        self._timer.cancel()
        if self.outcome is None:
            return False
        # By us, and by nothing else at the same time?
        is_ours = self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError)
        if is_ours and self.outcome == TOO_LATE and not self._sender.has_begun:
            raise DeadlineExceeded("the request's deadline is over") from None
        return is_ours

    def _on_lost(self) -> None:
        self._end("disconnected")

    def _end(self, outcome: str) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self._task.cancel()

    def _wait(self, now: float) -> None:
        """Until something may be due."""
        bounds = self._bounds
        beat = bounds.reader_stall_seconds
        if bounds.ping_seconds > 0:
            beat = min(beat, bounds.ping_seconds)
        silent = self._sender.silent_seconds(now)
        pause = min(bounds.give_up_at - now, beat - silent if silent < beat else beat)
        self._timer = self._loop.call_later(max(0.0, pause), self._look)

    def _look(self) -> None:
        now = self._clock.now()
        bounds, sender = self._bounds, self._sender
        if now >= bounds.give_up_at:
            self._cut_off(TOO_LATE)
        elif sender.stalled_seconds(now) >= bounds.reader_stall_seconds:
            log.warning("client does not read", seconds=bounds.reader_stall_seconds)
            self._cut_off("slow_reader")
        else:
            if 0 < bounds.ping_seconds <= sender.silent_seconds(now):
                sender.ping()
            self._wait(now)

    def _cut_off(self, outcome: str) -> None:
        self._end(outcome)
        if self._sender.has_begun:
            self._connection.abort()
