"""Connections to decode workers: one for each worker, found by address and epoch."""

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proto.router_pb2 import WorkerRef
from rpc.multiplex_client import MultiplexClient


class _Connection:
    def __init__(self, worker: WorkerRef) -> None:
        self.calls = MultiplexClient(worker.address, peer_epoch=worker.epoch)
        self.num_users = 0


class ChannelPool:
    """Keeps connections open between calls, and closes those of workers that are gone.

    A restarted worker is another peer: it gets a new connection, and the old one is closed
    with its last call. Beyond `max_idle` unused connections the longest unused are closed.
    """

    def __init__(self, *, max_idle: int = 64) -> None:
        self._max_idle = max_idle
        self._connections: OrderedDict[tuple[str, str], _Connection] = OrderedDict()

    def __len__(self) -> int:
        return len(self._connections)

    @asynccontextmanager
    async def lease(self, worker: WorkerRef) -> AsyncIterator[MultiplexClient]:
        """The connection to `worker`, open while the block runs.

        Raises ValueError when its address is not host:port.
        """
        key = (worker.address, worker.epoch)
        connection = self._connections.get(key)
        if connection is None:
            connection = self._connections[key] = _Connection(worker)
        self._connections.move_to_end(key)
        connection.num_users += 1
        try:
            yield connection.calls
        finally:
            connection.num_users -= 1
            await self._close_stale()

    async def close(self) -> None:
        """Closes all connections; calls still running on them fail."""
        connections = list(self._connections.values())
        self._connections.clear()
        for connection in connections:
            await connection.calls.close()

    async def _close_stale(self) -> None:
        """Closes unused connections that are outdated or too many."""
        newest = dict(self._connections.keys())
        if len(newest) == len(self._connections) <= self._max_idle:
            return
        idle = [key for key, one in self._connections.items() if one.num_users == 0]
        num_surplus = len(idle) - self._max_idle
        stale = [
            key
            for position, key in enumerate(idle)
            if position < num_surplus or newest[key[0]] != key[1]
        ]
        for key in stale:
            connection = self._connections.get(key)
            # While one is closed others lease, and close.
            if connection is not None and connection.num_users == 0:
                del self._connections[key]
                await connection.calls.close()
