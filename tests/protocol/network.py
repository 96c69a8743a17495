"""gRPC between processes of one test: each message arrives when the explorer says so.

What one call says in one direction stays in order; calls overtake each other. A connection that
breaks loses what is on its way, and each side notices by itself. It stands in for
`rpc.client.channel`: the product's own stubs call through it.
"""

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import ChannelConnectivity

from core.errors import EpserveError
from proto.generate_pb2 import GenerateRequest, PrefillRequest
from rpc.status import to_status
from tests.protocol.process import Process

Choice = tuple[str, Callable[[], None]]


class Context:
    """As much of a `ServicerContext` as the services use."""

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()


# Which process a request is meant for.
_EPOCHS: dict[type, str] = {GenerateRequest: "decode_epoch", PrefillRequest: "prefill_epoch"}


class Over:
    """The last word of a stream that ends well."""


@dataclass(eq=False)
class Call:
    """`on_word` hears each reply, and an exception where it ends with one."""

    name: str
    request: Any
    behaviour: Callable[[Any, Context], Any]
    connection: "Connection"
    on_word: Callable[[object], None]
    to_server: deque[bool] = field(default_factory=lambda: deque([True]))  # False: cancelled
    to_client: deque[object] = field(default_factory=deque)
    is_left: bool = False  # by the client, or it has had the last word
    task: "asyncio.Task[None] | None" = None

    @property
    def epoch(self) -> str:
        return self.connection.server.name

    def serve(self) -> None:
        """The server hears the next word."""
        server = self.connection.server
        if self.to_server.popleft():
            self.task = server.loop.create_task(self._run(), name=self.name)
        elif self.task is not None:
            self.task.cancel()
        server.loop.run_ready()

    async def _run(self) -> None:
        try:
            answer = self.behaviour(self.request, Context())
            if inspect.isasyncgen(answer):
                async with aclosing(answer) as replies:
                    async for reply in replies:
                        self._say(reply)
                answer = Over
            else:
                answer = await answer
            meant = getattr(self.request, _EPOCHS.get(type(self.request), ""), self.epoch)
            assert meant == self.epoch, f"{self.epoch} has answered what {meant} was asked"
            self._say(answer)
        except EpserveError as error:
            code, text, trailers = to_status(error)
            metadata = grpc.aio.Metadata(*trailers)  # type: ignore[arg-type]
            self._say(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, text))

    def _say(self, word: object) -> None:
        if not self.connection.is_cut:
            self.to_client.append(word)

    def hear(self) -> None:
        """The client hears all that has come."""
        while self.to_client:
            self.tell(self.to_client.popleft())
        self.connection.client.loop.run_ready()

    def tell(self, word: object) -> None:
        if not self.is_left:
            self.is_left = word is Over or isinstance(word, Exception)
            self.on_word(word)

    def leave(self) -> None:
        """The client wants no more of it."""
        if not self.is_left:
            self.is_left = True
            if not self.connection.is_cut:
                self.to_server.append(False)

    @property
    def is_over(self) -> bool:
        ended = self.task is None or self.task.done()
        return self.is_left and ended and not (self.to_server or self.to_client)


@dataclass(eq=False)
class Connection:
    """Both sides are told of its end: the client before it may connect again."""

    client: Process
    server: Process
    channel: "Channel"
    calls: list[Call] = field(default_factory=list)
    is_cut: bool = False
    server_knows: bool = False

    @property
    def name(self) -> str:
        return f"the connection of {self.client.name} to {self.server.name}"

    def cut(self) -> None:
        self.is_cut = True
        for call in self.calls:
            call.to_server.clear()
            call.to_client.clear()

    def choices(self) -> Iterator[Choice]:
        client, server = self.client, self.server
        self.calls = [call for call in self.calls if not call.is_over]
        for call in self.calls:
            if call.to_server and server.can_run and not self.is_cut:
                said = "asked" if call.to_server[0] else "told to cancel"
                yield f"{server.name} is {said} {call.name}", call.serve
            if call.to_client and client.can_run and self.channel.connection is self:
                yield f"{client.name} hears the answer to {call.name}", call.hear
        if self.channel.connection is self and client.can_run:
            if self.is_cut or not server.is_alive:
                yield f"{client.name} notices that {server.name} is gone", self.channel.lose
            elif server.is_frozen:
                yield f"{client.name} hears nothing from {server.name}", self.channel.lose
        if not self.server_knows and server.can_run:
            if self.is_cut or not client.is_alive:
                yield f"{server.name} notices that {client.name} is gone", self.lose_client
            elif client.is_frozen:
                yield f"{server.name} hears nothing from {client.name}", self.lose_client

    def lose_client(self) -> None:
        self.server_knows = True
        self.cut()
        for call in self.calls:
            if call.task is not None:
                call.task.cancel()
        self.server.loop.run_ready()


class Channel:
    """As `grpc.aio.Channel`, of `client` to whoever is at `address`."""

    def __init__(self, network: "Network", client: Process, address: str) -> None:
        self.connection: Connection | None = None
        self.is_closed = False
        self._wants = False
        self._network = network
        self._client = client
        self._address = address
        self._changed: list[asyncio.Future[None]] = []

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity:
        self._wants = self._wants or try_to_connect
        if self.is_closed:
            return ChannelConnectivity.SHUTDOWN
        if self.connection is None:
            return ChannelConnectivity.IDLE
        return ChannelConnectivity.READY

    async def wait_for_state_change(self, last: ChannelConnectivity) -> None:
        while self.get_state() is last:
            changed = asyncio.get_running_loop().create_future()
            self._changed.append(changed)
            await changed

    async def close(self, _grace: float | None = None) -> None:
        self.is_closed = True
        if self.connection is not None:
            self.connection.cut()
            self.connection = None
        self._note_change()

    def unary_unary(self, path: str, *_serializers: object, **_options: object) -> Any:
        method = path.rpartition("/")[2]

        async def call(request: Any, timeout: float | None = None, metadata: object = ()) -> object:
            loop = asyncio.get_running_loop()
            answer = loop.create_future()
            name = f"{method} {request.attempt_id}"
            call = self.begin(method, name, request, lambda word: _resolve(answer, word))
            timer = None if timeout is None else loop.call_later(timeout, _expire, answer)
            try:
                reply = await answer
                call.is_left = True
                return reply
            finally:
                call.leave()
                if timer is not None:
                    timer.cancel()

        return call

    def begin(
        self, method: str, name: str, request: object, on_word: Callable[[object], None]
    ) -> Call:
        """Raises AioRpcError where nobody is there."""
        connection = self._connected()
        if connection is None:
            raise _unreachable()
        behaviour = getattr(connection.server.service, method)
        call = Call(name, request, behaviour, connection, on_word)
        connection.calls.append(call)
        return call

    def lose(self) -> None:
        connection, self.connection = self.connection, None
        assert connection is not None
        connection.cut()
        for call in connection.calls:
            call.tell(_unreachable())
        self._note_change()
        self._client.loop.run_ready()

    def choices(self) -> Iterator[Choice]:
        if self._wants and self.connection is None and not self.is_closed and self._client.can_run:
            server = self._network.servers.get(self._address)
            if server is not None and server.can_run:
                yield f"{self._client.name} connects to {server.name} again", self._reconnect

    def _reconnect(self) -> None:
        self._connected()
        self._client.loop.run_ready()

    def _connected(self) -> Connection | None:
        if self.connection is None:
            server = self._network.servers.get(self._address)
            if server is None or not server.can_run:
                self._wants = True
                return None
            self.connection = Connection(self._client, server, self)
            self._network.connections.append(self.connection)
            self._note_change()
        return self.connection

    def _note_change(self) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)


class Network:
    def __init__(self) -> None:
        self.servers: dict[str, Process] = {}  # who listens, by address
        self.connections: list[Connection] = []
        self.channels: list[Channel] = []

    def is_there(self, address: str) -> bool:
        return address in self.servers and self.servers[address].is_alive

    def channel(self, address: str) -> Channel:
        """Of the process that is running."""
        loop: Any = asyncio.get_running_loop()
        channel = Channel(self, loop.owner, address)
        self.channels.append(channel)
        return channel

    def choices(self) -> Iterator[Choice]:
        """What may happen next."""
        for connection in self.connections:
            yield from connection.choices()
        for channel in self.channels:
            yield from channel.choices()
        self.connections = [
            each
            for each in self.connections
            if each.channel.connection is each or not each.server_knows
        ]


def _resolve(answer: "asyncio.Future[object]", word: object) -> None:
    if answer.done():
        return
    if isinstance(word, Exception):
        answer.set_exception(word)
    else:
        answer.set_result(word)


def _expire(answer: "asyncio.Future[object]") -> None:
    _resolve(answer, _rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "too late"))


def _unreachable() -> grpc.aio.AioRpcError:
    return _rpc_error(grpc.StatusCode.UNAVAILABLE, "not there")


def _rpc_error(code: grpc.StatusCode, text: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text)
