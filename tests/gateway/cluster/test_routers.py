"""Several routers: all are told, any will do, and a name may have many addresses."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.errors import Overloaded, Unavailable
from gateway.cluster.routers import Routers
from proto.router_pb2 import AnnounceRequest, AssignRequest, AssignResponse
from proto.worker_pb2 import ROLE_GATEWAY, ProcessIdentity
from tests.eventually import eventually
from tests.gateway.conftest import EOS_ID, running_gateway, tokens_of
from tests.gateway.fake_cluster import FakeCluster, FakeRouter

PATIENCE_SECONDS = 30.0


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tokens_of, EOS_ID) as cluster:
        yield cluster


@pytest.fixture
async def other(cluster: FakeCluster) -> AsyncIterator[FakeRouter]:
    """A second router that knows the same workers."""
    router = FakeRouter()
    router.decodes = cluster.router.decodes
    await router.start()
    yield router
    await router.server.stop(0)


@pytest.fixture
async def routers(cluster: FakeCluster, other: FakeRouter) -> AsyncIterator[Routers]:
    routers = Routers([cluster.router.server.address, other.server.address])
    # Connected, as announcements make them.
    await routers.announce(AnnounceRequest(), timeout_seconds=20)
    yield routers
    await routers.close()


async def assign(routers: Routers, first_page: int | None = None) -> AssignResponse:
    def request() -> AssignRequest:
        waited_seconds = time.monotonic() - asked_at
        return AssignRequest(
            request_id="r", model="m", num_prompt_tokens=5, waited_seconds=waited_seconds
        )

    asked_at = time.monotonic()
    content = await routers.assign(request, first_page=first_page, timeout_seconds=20)
    return AssignResponse.FromString(content)


async def test_all_are_told_and_the_one_that_knows_most_is_believed(
    cluster: FakeCluster, other: FakeRouter, routers: Routers
) -> None:
    cluster.router.ready = False
    other.log_level = "debug"
    identity = ProcessIdentity(role=ROLE_GATEWAY, name="g")
    answer = await routers.announce(AnnounceRequest(identity=identity), timeout_seconds=20)
    for router in (cluster.router, other):
        assert router.announcements[-1].identity == identity
    assert (answer.ready, answer.log_level) == (True, "debug")
    await other.server.stop(0)
    answer = await routers.announce(AnnounceRequest(), timeout_seconds=20)
    assert not answer.ready
    await cluster.router.server.stop(0)
    with pytest.raises(Unavailable):
        await routers.announce(AnnounceRequest(), timeout_seconds=20)


async def test_requests_that_begin_alike_go_to_the_same_router(
    cluster: FakeCluster, other: FakeRouter, routers: Routers
) -> None:
    for page in range(40):
        before = len(cluster.router.requests)
        for _ in range(3):
            await assign(routers, page)
        assert len(cluster.router.requests) - before in (0, 3)
    assert len(cluster.router.requests) > 15
    assert len(other.requests) > 15
    for _ in range(20):  # without a whole page, all take part
        await assign(routers)
    assert min(len(cluster.router.requests), len(other.requests)) > 18


async def test_a_dead_router_costs_nothing(
    cluster: FakeCluster, other: FakeRouter, routers: Routers
) -> None:
    cluster.router.hang = True
    waiting = [asyncio.create_task(assign(routers, page)) for page in range(16)]
    await eventually(lambda: len(cluster.router.requests) + len(other.requests) == 16)
    assert cluster.router.requests
    num_moved = len(cluster.router.requests)
    await asyncio.sleep(0.1)
    await cluster.router.server.stop(0)  # with calls that wait there
    async with asyncio.timeout(20):
        for answer in await asyncio.gather(*waiting):
            assert answer.decode.address
        for request in other.requests[-num_moved:]:
            assert 0.05 < request.waited_seconds < 20  # nobody's place is lost
        for page in range(16):
            assert (await assign(routers, page)).decode.address


async def test_full_means_full_but_a_router_without_workers_is_passed_over(
    cluster: FakeCluster, other: FakeRouter, routers: Routers
) -> None:
    for router in (cluster.router, other):
        router.errors.append(Overloaded("full", retry_after_seconds=1))
    with pytest.raises(Overloaded):
        await assign(routers)
    cluster.router.errors.clear()
    other.errors.clear()
    cluster.router.errors.extend([Unavailable("no worker is up")] * 8)
    for page in range(8):
        await assign(routers, page)
    cluster.router.errors.extend([Unavailable("no worker is up")] * 8)
    await other.server.stop(0)
    with pytest.raises(Unavailable, match="no worker is up"):
        await assign(routers)


async def test_the_addresses_of_a_name_come_and_go(cluster: FakeCluster, other: FakeRouter) -> None:
    port = cluster.router.server.bound_port
    found = {"routers": ["127.0.0.1"]}

    def lookup(host: str, port: int) -> list[str]:
        if host not in found:
            raise OSError("the resolver is away")
        return [f"{ip}:{port}" for ip in found[host]]

    routers = Routers([f"routers:{port}"], lookup=lookup)
    try:
        await eventually(lambda: routers.addresses == [f"127.0.0.1:{port}"])
        await assign(routers)
        found["routers"] = ["127.0.0.1", "127.0.0.2"]
        await eventually(lambda: len(routers.addresses) == 2)
        # Nobody listens at the second; the first has it all.
        for page in range(8):
            await assign(routers, page)
        found.clear()
        await assign(routers)
        assert len(routers.addresses) == 2
        found["routers"] = []
        await assign(routers)
    finally:
        await routers.close()


async def test_closing_ends_connections_to_addresses_that_have_gone(cluster: FakeCluster) -> None:
    known = threading.Event()

    def lookup(host: str, port: int) -> list[str]:
        known.wait(PATIENCE_SECONDS)
        return [f"127.0.0.1:{port}"]

    routers = Routers([f"localhost:{cluster.router.server.bound_port}"], lookup=lookup)
    await assign(routers)  # by its name
    known.set()
    await eventually(lambda: "localhost" not in routers.addresses[0])
    await routers.close()
    await eventually(lambda: not any("_Session" in repr(task) for task in asyncio.all_tasks()))


async def test_a_gateway_outlives_one_of_two_routers(
    cluster: FakeCluster, other: FakeRouter, model_folder: Path
) -> None:
    both = f"{cluster.router.server.address},{other.server.address}"
    async with running_gateway(cluster, model_folder, router=both) as gateway:
        streams = [asyncio.create_task(gateway.complete(f"echo {i}")) for i in range(12)]
        await cluster.router.server.stop(0)
        streams += [asyncio.create_task(gateway.complete(f"echo {i}")) for i in range(12)]
        for reply in await asyncio.gather(*streams):
            assert reply.status_code == 200
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await gateway.client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.05)
