"""Connections to decode workers: one for each worker, found by address and epoch."""

from collections import OrderedDict
from types import TracebackType

from proto.router_pb2 import WorkerRef
from rpc.multiplex_client import MultiplexClient


class _Connection:
    def __init__(self, worker: WorkerRef) -> None:
        self.calls = MultiplexClient(worker.address, peer_epoch=worker.epoch)
        self.num_users = 0

    async def close(self) -> None:
        await self.calls.close()


class Lease:
    """A connection in use, from the beginning of the block to its end."""

    def __init__(self, pool: "ChannelPool", connection: _Connection) -> None:
        self._pool = pool
        self._connection = connection

    async def __aenter__(self) -> MultiplexClient:
        self._connection.num_users += 1
        return self._connection.calls

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.num_users -= 1
        await self._pool.close_stale()


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

    def lease(self, worker: WorkerRef) -> Lease:
        """The connection to `worker`, open for as long as an `async with` of it runs.

        Raises ValueError when its address is not host:port.
        """
        key = (worker.address, worker.epoch)
        connection = self._connections.get(key)
        if connection is None:
            connection = self._connections[key] = _Connection(worker)
        self._connections.move_to_end(key)
        return Lease(self, connection)

    async def close(self) -> None:
        """Closes all connections; calls still running on them fail."""
        connections = list(self._connections.values())
        self._connections.clear()
        for connection in connections:
            await connection.close()

    async def close_stale(self) -> None:
        """Closes what nobody uses and is too old, or too much."""
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
                await connection.close()
