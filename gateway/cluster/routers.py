"""The routers that a gateway can ask: those given, and all addresses of their names.

Routers do not talk to each other; each sees all workers. Requests whose prompts begin alike go to
the same one, which then knows best who has their pages; when it is not there, to another at once.
"""

import asyncio
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import grpc

from core import tracing
from core.errors import EpserveError, Unavailable
from core.log import get_logger
from core.resolver import Lookup, is_literal, resolve, system_lookup
from proto.router_pb2 import AnnounceRequest, AnnounceResponse, AssignRequest
from proto.router_pb2_grpc import RouterStub
from rpc.client import channel, to_error
from rpc.multiplex_client import MultiplexClient

if TYPE_CHECKING:  # only the stubs of the type checker have it
    from proto.router_pb2_grpc import RouterAsyncStub

log = get_logger("gateway.routers")

ASSIGN = "/epserve.router.v1.Router/Assign"
LOOKUP_INTERVAL_SECONDS = 3.0
LOOKUP_SECONDS = 3.0
# For calls that wait at a router whose address is not listed any more.
RETIRE_SECONDS = 30.0


class _Router:
    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = channel(address)
        self._calls = MultiplexClient(address)
        self._announcements: RouterAsyncStub = RouterStub(self._channel)
        self._is_silent = False

    @property
    def is_connected(self) -> bool:
        """It is there and answers, as far as is known: each announcement looks."""
        is_there = self._channel.get_state() is grpc.ChannelConnectivity.READY
        return is_there and not self._is_silent

    async def announce(
        self, request: AnnounceRequest, timeout_seconds: float
    ) -> AnnounceResponse | EpserveError:
        try:
            answer = await self._announcements.Announce(request, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as failure:
            self._is_silent = failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return to_error(failure)
        self._is_silent = False
        return answer

    async def assign(self, request: bytes, timeout_seconds: float) -> bytes:
        with tracing.begin("assign", tracing.Kind.CLIENT) as span:
            if span.is_recording:
                span.note({"epserve.router": self.address})
            asking = self._calls.call(
                ASSIGN, request, timeout_seconds=timeout_seconds, trace=span.context
            )
            with asking as call:
                return await call.take()

    async def close(self) -> None:
        await self._calls.close()
        await self._channel.close(grace=None)

    async def retire(self) -> None:
        """Closes it when no call can wait for an answer any more."""
        await asyncio.sleep(RETIRE_SECONDS)
        await self.close()


class Routers:
    """`addresses` are host:port, names or not. Create it inside the running loop; names are
    looked up until `close`, and asked as they are until that has worked once."""

    def __init__(self, addresses: Sequence[str], *, lookup: Lookup = system_lookup) -> None:
        self._lookup = lookup
        self._found = {address: [address] for address in addresses}
        self._routers = {address: _Router(address) for address in self._found}
        self._pacer = itertools.count()
        self._retiring: dict[asyncio.Task[None], _Router] = {}
        self._following = [
            asyncio.create_task(self._follow(address))
            for address in self._found
            if not is_literal(address)
        ]

    @property
    def addresses(self) -> list[str]:
        return sorted(self._routers)

    @property
    def is_connected(self) -> bool:
        """Some router is there, as far as is known."""
        return any(router.is_connected for router in self._routers.values())

    async def assign(
        self,
        make_request: Callable[[], AssignRequest],
        *,
        first_page: int | None,
        timeout_seconds: float,
    ) -> bytes:
        """Answer to an AssignRequest, of the first router that is there and has a pair. It is
        made anew for each: it tells how long it has waited, at other routers, too.

        `first_page` is the hash of the prompt's first page, if it fills one. Raises what
        routers say when none has a pair.
        """
        until = asyncio.get_running_loop().time() + timeout_seconds
        error = unknown = Unavailable("there is no router")
        for router in self._in_order(first_page):
            seconds = until - asyncio.get_running_loop().time()
            try:
                request = make_request().SerializeToString()
                return await router.assign(request, max(0, seconds))
            except Unavailable as failure:
                # One that is there knows more about why there is no pair.
                if error is unknown or router.is_connected:
                    error = failure
        raise error

    async def announce(
        self, request: AnnounceRequest, *, timeout_seconds: float
    ) -> AnnounceResponse:
        """Tells all routers, and returns the answer of one that knows most. Raises EpserveError
        when none answers."""
        told = await asyncio.gather(
            *(router.announce(request, timeout_seconds) for router in list(self._routers.values()))
        )
        answers = [one for one in told if isinstance(one, AnnounceResponse)]
        if not answers:
            raise next(
                (one for one in told if isinstance(one, EpserveError)),
                Unavailable("there is no router"),
            )
        best = max(answers, key=lambda answer: (answer.ready, answer.page_tokens > 0))
        # An operator speaks to one router only.
        best.log_level = next((one.log_level for one in answers if one.log_level), "")
        return best

    async def close(self) -> None:
        tasks = [*self._following, *self._retiring]
        routers = [*self._routers.values(), *self._retiring.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for router in routers:
            await router.close()

    def _in_order(self, first_page: int | None) -> list[_Router]:
        if len(self._routers) == 1:
            return [*self._routers.values()]
        key = next(self._pacer) if first_page is None else first_page

        def rank(router: _Router) -> tuple[bool, int]:
            # By address and page alone: all gateways agree, and when a router comes or goes
            # only its own share moves.
            return not router.is_connected, zlib.crc32(f"{router.address} {key}".encode())

        return sorted(self._routers.values(), key=rank)

    async def _follow(self, name: str) -> None:
        problem = ""
        while True:
            try:
                found = await resolve(name, timeout_seconds=LOOKUP_SECONDS, lookup=self._lookup)
                problem = "" if found else "no such name, or no address"
            except OSError as error:
                found, problem = [], str(error)
            if problem:
                log.debug("routers' name cannot be looked up", dns_name=name, reason=problem)
            elif found != self._found[name]:
                self._found[name] = found
                self._adopt()
            await asyncio.sleep(LOOKUP_INTERVAL_SECONDS)

    def _adopt(self) -> None:
        wanted = list(dict.fromkeys(address for found in self._found.values() for address in found))
        before = self._routers
        self._routers = {
            address: before[address] if address in before else _Router(address)
            for address in wanted
        }
        log.info("routers", addresses=self.addresses)
        for address, router in before.items():
            if address not in self._routers:
                retiring = asyncio.create_task(router.retire())
                self._retiring[retiring] = router
                retiring.add_done_callback(self._retiring.pop)
