"""Turns at something slow, shared out among clients.

async with turns.of(client):      # one at a time for each, who has used least lately goes first
    ...
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from core.clock import Clock
from core.errors import Overloaded, RateLimited

# What a client may use in vain at once, and what comes back of it in a second.
MAX_SECONDS = 15.0
REFILL = 0.1
MAX_WAITING = 64  # of each client
MAX_WAITING_IN_ALL = 512


class FairTurns:
    """`num_turns` at once, of different clients."""

    def __init__(self, num_turns: int, clock: Clock) -> None:
        self._num_free = num_turns
        self._clock = clock
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._busy: set[str] = set()
        self._used, self._wasted = _Seconds(clock), _Seconds(clock)

    def check(self, client: str) -> None:
        """Raises RateLimited when the client has used too much in vain lately, and Overloaded when
        too many of its own, or of all, wait."""
        over = self._wasted.of(client) - MAX_SECONDS
        if over > 0:
            text = f"more than {MAX_SECONDS:g} s went into constraints of this client in vain"
            raise RateLimited(text, retry_after_seconds=over / REFILL)
        if len(self._waiting.get(client, ())) >= MAX_WAITING:
            raise Overloaded("too many constraints of this client wait to be compiled")
        if sum(map(len, self._waiting.values())) >= MAX_WAITING_IN_ALL:
            raise Overloaded("too many constraints wait to be compiled")

    def blame(self, client: str, seconds: float) -> None:
        """What was used for `client` was in vain."""
        self._wasted.add(client, seconds)

    @asynccontextmanager
    async def of(self, client: str) -> AsyncIterator[None]:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(client)
            raise
        began = self._clock.now()
        try:
            yield
        finally:
            self._used.add(client, self._clock.now() - began)
            self._end(client)

    def _end(self, client: str) -> None:
        self._busy.discard(client)
        self._num_free += 1
        self._next()

    def _next(self) -> None:
        while self._num_free:
            ready = [client for client in self._waiting if client not in self._busy]
            if not ready:
                return
            client = min(ready, key=self._used.of)
            queue = self._waiting[client]
            turn = queue.popleft()
            if not queue:
                del self._waiting[client]
            if turn.cancelled():
                continue
            self._busy.add(client)
            self._num_free -= 1
            turn.set_result(None)


class _Seconds:
    """By client; REFILL of them are forgotten in a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sums: dict[str, tuple[float, float]] = {}  # seconds, and when that was so

    def of(self, client: str) -> float:
        seconds, since = self._sums.get(client, (0.0, 0.0))
        return max(0.0, seconds - REFILL * (self._clock.now() - since))

    def add(self, client: str, seconds: float) -> None:
        total = self.of(client) + seconds
        self._sums = {one: self._sums[one] for one in self._sums if self.of(one)}
        self._sums[client] = (total, self._clock.now())
