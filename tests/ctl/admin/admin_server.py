"""An admin service that says what the test wants, in a thread: commands have their own loop."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from core.errors import EpserveError, NotFound
from proto import router_pb2, router_pb2_grpc
from rpc.server import RpcServer

PATIENCE_SECONDS = 10


class ScriptedAdmin(router_pb2_grpc.AdminServicer):
    """`replies` holds, for each method, a reply, an error, or a list of them of which the last
    one stays; `calls` what came: method, request, authorization."""

    def __init__(self, **replies: Any) -> None:
        self.replies = replies
        self.calls: list[tuple[str, Any, str]] = []

    def requests(self, method: str) -> list[Any]:
        return [request for name, request, _ in self.calls if name == method]

    def _answer(self, method: str, request: Any, context: Any) -> Any:
        metadata = dict(context.invocation_metadata())
        self.calls.append((method, request, metadata.get("authorization", "")))
        reply = self.replies.get(method, NotFound(f"no reply for {method}"))
        if isinstance(reply, list):
            reply = reply.pop(0) if len(reply) > 1 else reply[0]
        if isinstance(reply, EpserveError):
            raise reply
        return reply

    async def GetStatus(self, request: Any, context: Any) -> Any:
        return self._answer("GetStatus", request, context)

    async def DrainWorker(self, request: Any, context: Any) -> Any:
        return self._answer("DrainWorker", request, context)

    async def GetConfig(self, request: Any, context: Any) -> Any:
        return self._answer("GetConfig", request, context)

    async def SetLogLevel(self, request: Any, context: Any) -> Any:
        return self._answer("SetLogLevel", request, context)

    async def ExplainRequest(self, request: Any, context: Any) -> Any:
        return self._answer("ExplainRequest", request, context)


@contextmanager
def admin_server(admin: ScriptedAdmin) -> Iterator[str]:
    """The address where it serves within the block."""
    address: list[str] = []
    up = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        server = RpcServer("127.0.0.1:0")
        server.add(router_pb2_grpc.add_AdminServicer_to_server, admin, router_pb2, "Admin")
        await server.start()
        address.append(server.address)
        up.set()
        await stop.wait()
        await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert up.wait(PATIENCE_SECONDS)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
