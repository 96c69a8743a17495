"""New requests begin one after the other, with turns of the event loop between them.

A new prompt takes as long as the rest of its request. Prompts that come together would be worked
on in one turn, and whatever arrives meanwhile (a pair of workers, a token) would wait for all.
"""

import asyncio
from collections import deque

# To read what has come, to wake who waits for it, to send what those ask for.
TURNS_BETWEEN = 3


class StartPacer:
    """Of the running loop."""

    def __init__(self) -> None:
        self._is_taken = False  # something has begun in this turn, or waits
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Returns at once, but for those who come together with others."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            waiting = loop.create_future()
            self._waiting.append(waiting)
            await waiting
        else:
            self._is_taken = True
            loop.call_soon(self._go_on, loop, TURNS_BETWEEN)

    def _go_on(self, loop: asyncio.AbstractEventLoop, num_turns: int) -> None:
        while self._waiting and self._waiting[0].done():  # its client has left
            self._waiting.popleft()
        if not self._waiting:
            self._is_taken = False
        elif num_turns > 1:
            loop.call_soon(self._go_on, loop, num_turns - 1)
        else:
            self._waiting.popleft().set_result(None)
            loop.call_soon(self._go_on, loop, TURNS_BETWEEN)
