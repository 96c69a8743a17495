"""Two router processes, one of which is killed under load: no request notices."""

import asyncio
from functools import partial

from gateway.cluster.routers import Routers
from proto.router_pb2 import AnnounceRequest, AssignRequest, AssignResponse, GetStatusRequest
from proto.router_pb2_grpc import AdminStub
from proto.worker_pb2 import ROLE_GATEWAY, ProcessIdentity
from rpc.client import channel
from tests.router.discovery.test_discovery_process import router
from tests.router.fake_worker import FakeWorker

NUM_CLIENTS = 8
NUM_REQUESTS = 40


async def gateways_of(address: str) -> list[str]:
    async with channel(address) as peer:
        status = await AdminStub(peer).GetStatus(GetStatusRequest(), timeout=30)
    return [process.name for process in status.processes if process.role == ROLE_GATEWAY]


async def test_a_killed_router_fails_no_assignment() -> None:
    async with (
        FakeWorker("prefill", "p", max_running=10_000) as prefill,
        FakeWorker("decode", "d", max_running=10_000, pages_free=10**6) as decode,
        router("--prefill", prefill.address, "--decode", decode.address) as first,
        router("--prefill", prefill.address, "--decode", decode.address) as second,
    ):
        for one in (first, second):
            await one.until_pair("p", "d")
        routers = Routers([first.address, second.address])
        identity = ProcessIdentity(role=ROLE_GATEWAY, name="g", address="h:1", epoch="e")
        answer = await routers.announce(AnnounceRequest(identity=identity), timeout_seconds=30)
        assert answer.ready
        assert await gateways_of(first.address) == await gateways_of(second.address) == ["g"]
        num_done = 0

        async def client(number: int) -> None:
            nonlocal num_done
            for index in range(NUM_REQUESTS):
                page = number * NUM_REQUESTS + index
                make_request = partial(
                    AssignRequest,
                    request_id=str(page),
                    model="demo",
                    num_prompt_tokens=64,
                    prefix_hashes=page.to_bytes(8, "little"),
                )
                content = await routers.assign(make_request, first_page=page, timeout_seconds=30)
                assert AssignResponse.FromString(content).decode.epoch == "d"
                num_done += 1
                if num_done == NUM_CLIENTS * NUM_REQUESTS // 3:
                    first.process.kill()

        try:
            await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
            assert await first.process.wait() != 0
            answer = await routers.announce(AnnounceRequest(identity=identity), timeout_seconds=30)
            assert answer.ready
        finally:
            await routers.close()
