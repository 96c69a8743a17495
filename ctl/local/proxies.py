"""Proxies between the processes of a `ctl up --proxies`, for partitions and slow links.

One stands before each router and worker, at the same port of `PROXY_HOST`, and knows by its socket
which process a connection comes from. Whoever connects to the socket of `control_path` and writes a
`Rule` as a line of JSON gets a line back, empty or with what is wrong; the rule is in force until
that connection ends, so that nobody can leave one behind.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from core.address import Address
from ctl.base.ports import PROXY_HOST
from ctl.local.own_cluster import OwnCluster

_READ_BYTES = 2**16


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What passes between two processes, in either direction, is late by so much; None: nothing
    passes, and connections stay as they are."""

    between: tuple[str, str]
    delay_seconds: float | None


def control_path(run_folder: Path) -> Path:
    """The socket; only this user reaches it."""
    return run_folder / "proxies.sock"


@asynccontextmanager
async def proxies(run_folder: Path, addresses: Mapping[str, Address]) -> AsyncGenerator[None]:
    """Before the processes at these addresses, by name. Raises OSError when a port is taken."""
    between = _Between(OwnCluster(run_folder), addresses)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(between.close)
        for name, address in addresses.items():
            accept = partial(between.accept, name)
            server = await asyncio.start_server(accept, PROXY_HOST, address.port)
            stack.callback(server.close)
        path = control_path(run_folder)
        stack.callback((await asyncio.start_unix_server(between.obey, path)).close)
        yield


@asynccontextmanager
async def ruled(run_folder: Path, rule: Rule) -> AsyncGenerator[None]:
    """While the rule is in force. Raises OSError without proxies, ValueError for what they
    refuse."""
    reader, writer = await asyncio.open_unix_connection(control_path(run_folder))
    try:
        writer.write(msgspec.json.encode(rule) + b"\n")
        if problem := (await reader.readline()).decode().strip():
            raise ValueError(problem)
        yield
    finally:
        writer.close()


class _Ends:
    """Of a connection to the process `target`. Where it comes from is asked only once it matters:
    to find out takes a while."""

    def __init__(self, target: str, find: Callable[[], str]) -> None:
        self.target = target
        self._find = find
        self._source: asyncio.Task[str] | None = None

    async def match(self, rule: Rule) -> bool:
        if self.target not in rule.between:
            return False
        if self._source is None:
            self._source = asyncio.create_task(asyncio.to_thread(self._find))
        return {self.target, await asyncio.shield(self._source)} == {*rule.between}


class _Between:
    def __init__(self, cluster: OwnCluster, addresses: Mapping[str, Address]) -> None:
        self._cluster = cluster
        self._addresses = addresses
        self._rules: list[Rule] = []
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection to the process `name`."""
        self._spawn(self._join(name, reader, writer))

    def obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection of somebody who has a rule."""
        self._spawn(self._keep_rule(reader, writer))

    async def close(self) -> None:
        """Ends all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Until either side ends it."""
        address = self._addresses[name]
        port = writer.get_extra_info("peername")[1]
        ends = _Ends(name, partial(self._cluster.connected_from, port, address.port))
        try:
            await self._passage(ends)
            behind, to_behind = await asyncio.open_connection(*address)
        except OSError:
            writer.transport.abort()
            return
        ways = ((reader, to_behind), (behind, writer))
        pumps = [asyncio.create_task(self._pump(ends, *way)) for way in ways]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            writer.close()
            to_behind.close()

    async def _keep_rule(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            rule = msgspec.json.decode(await reader.readline(), type=Rule)
            if rule.delay_seconds is not None and not 0 <= rule.delay_seconds < math.inf:
                raise ValueError(f"a delay of {rule.delay_seconds} s")
        except ValueError as error:
            writer.write(f"{error}\n".encode())
            writer.close()
            return
        self._change([*self._rules, rule])
        try:
            writer.write(b"\n")
            await reader.read()
        finally:
            self._change([each for each in self._rules if each is not rule])
            writer.close()

    def _change(self, rules: list[Rule]) -> None:
        self._rules = rules
        self._changed.set()
        self._changed = asyncio.Event()

    async def _pump(
        self, ends: _Ends, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                await self._passage(ends)
                writer.write(data)
                await writer.drain()
        await self._passage(ends)  # nor does the end of a connection pass

    async def _passage(self, ends: _Ends) -> None:
        """Returns when bytes may pass."""
        while True:
            changed = self._changed
            delays = [rule.delay_seconds for rule in self._rules if await ends.match(rule)]
            if None not in delays:
                await asyncio.sleep(sum(filter(None, delays)))
                return
            await changed.wait()
