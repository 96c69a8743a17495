"""Whether there is still a process at an address, also one that is frozen and answers nothing.

Its kernel takes connections in its place for as long as it exists, and resets them when it ends;
a host that is gone does not answer. One connection, on which nothing is said, tells which.
"""

import asyncio

from core.address import parse_address
from core.keepalive import keep_alive

CONNECT_SECONDS = 2.0


class Liveness:
    """Of one address; all calls from one event loop."""

    def __init__(self, address: str) -> None:
        self._address = parse_address(address)
        self._transport: asyncio.Transport | None = None
        self._asking: asyncio.Task[bool] | None = None  # one answer for all who ask meanwhile

    async def is_there(self) -> bool:
        """Takes CONNECT_SECONDS at most, however many ask."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name="presence")
        return await asyncio.shield(self._asking)

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _ask(self) -> bool:
        if self._transport is None or self._transport.is_closing():
            self._transport = await self._connect()
        return self._transport is not None

    async def _connect(self) -> asyncio.Transport | None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                transport, _ = await loop.create_connection(asyncio.Protocol, *self._address)
        # Refused, no route, no such name, TimeoutError; and what cannot be a name.
        except (OSError, UnicodeError):
            return None
        keep_alive(transport.get_extra_info("socket"))
        return transport
