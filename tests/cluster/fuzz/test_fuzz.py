"""Hostile bytes at every port of a cluster, beside plain streams that must not notice.

`make fuzz` goes on with new seeds for FUZZ_SECONDS; one that fails is added to failed_seeds.txt,
whose seeds are tried each time.
"""

import asyncio
import ipaddress
import itertools
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from bench.serving.attacks import Attack, make_attack
from tests.cluster.harness import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(0)]

FAILED_SEEDS = Path(__file__).with_name("failed_seeds.txt")
NUM_SEEDS = 400
NUM_ATTACKERS = 4
READ_SECONDS = 0.2
# What gRPC says to bytes that are no message, and to methods that a port does not have.
REFUSALS = {"INVALID_ARGUMENT", "UNIMPLEMENTED", "UNAUTHENTICATED"}
STREAMS: tuple[dict[str, Any], ...] = (
    {"prompt": "The cat", "max_tokens": 40, "temperature": 0},
    {"prompt": "One day a dog", "max_tokens": 40, "temperature": 1, "seed": 5},
    {"prompt": [5, 6, 7, 8], "max_tokens": 40, "temperature": 0.7, "seed": 6, "logprobs": 2},
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With a group of two ranks, which has a rendezvous."""
    with Cluster(Path(tmp_path_factory.mktemp("fuzz")), "--decode-ranks", "2") as cluster:
        yield cluster


def processes(cluster: Cluster) -> list[psutil.Process]:
    return psutil.Process(cluster.process.pid).children(recursive=True)


def listening(cluster: Cluster) -> set[tuple[str, int]]:
    """Addresses of all processes, whatever listens there."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes(cluster)
        for connection in process.net_connections("inet")
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    }


def test_nothing_listens_beyond_this_machine(cluster: Cluster) -> None:
    """Nor does any of the cluster's own libraries."""
    addresses = listening(cluster)
    assert len({port for _, port in addresses}) >= 10, addresses
    for host, _ in addresses:
        assert ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback, addresses


def seeds() -> Iterator[int]:
    """Those that failed before, and as many as there is time for."""
    yield from map(int, FAILED_SEEDS.read_text().split())
    seconds = float(os.environ.get("FUZZ_SECONDS", "0"))
    if not seconds:
        yield from range(NUM_SEEDS)
        return
    until = time.monotonic() + seconds
    for seed in itertools.count(time.time_ns() // 1000):
        if time.monotonic() > until:
            return
        yield seed


async def strike(attack: Attack, cluster: Cluster, ports: list[int]) -> None:
    port = cluster.port if attack.is_http else ports[attack.seed % len(ports)]
    if attack.method:
        code = await call(f"127.0.0.1:{cluster.port + 1 + attack.seed % 5}", attack)
        assert code in REFUSALS | {"UNAVAILABLE", "DEADLINE_EXCEEDED"}, (attack, code)
        return
    reply = await talk(port, attack)
    if port == cluster.port and (match := re.match(rb"HTTP/1\.1 (\d+)", reply)):
        assert int(match[1]) < 500, (attack, reply)


async def call(address: str, attack: Attack) -> str:
    """The name of the status that the call ends with."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            await channel.unary_unary(attack.method)(attack.pieces[0], timeout=2)  # type: ignore[misc]
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


async def talk(port: int, attack: Attack) -> bytes:
    """What comes in return within a moment."""
    reply = b""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for piece in attack.pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            if attack.is_half_closed:
                writer.write_eof()
            async with asyncio.timeout(READ_SECONDS):
                while data := await reader.read(2**16):
                    reply += data
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()
    return reply


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """What a stream says in all: where its events end is a matter of time."""
    reply = await client.post("/v1/completions", json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    *events, done = (line for line in reply.text.splitlines() if line.startswith("data: "))
    assert done == "data: [DONE]"
    choices = [json.loads(event[6:])["choices"][0] for event in events]
    scores = [each["logprobs"]["token_logprobs"] for each in choices if each["logprobs"]]
    return {
        "text": "".join(each["text"] for each in choices),
        "logprobs": [*itertools.chain.from_iterable(scores)],
        "finish": [each["finish_reason"] for each in choices if each["finish_reason"]],
    }


async def attack_all(cluster: Cluster, ports: list[int]) -> None:
    """Raises what the first attack that went wrong raised, and keeps its seed."""
    pending = seeds()

    async def attacker() -> None:
        for seed in pending:
            try:
                await strike(make_attack(seed, cluster.model), cluster, ports)
            except AssertionError:
                keep(seed)
                raise

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_ATTACKERS):
            group.create_task(attacker())


def keep(seed: int) -> None:
    known = FAILED_SEEDS.read_text().split()
    if str(seed) not in known:
        FAILED_SEEDS.write_text("\n".join([*known, str(seed), ""]))


async def test_streams_beside_attacks_are_as_without(cluster: Cluster) -> None:
    ports = sorted({port for _, port in listening(cluster)})
    pids = {process.pid for process in processes(cluster)}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:

        def streams() -> Any:  # noqa: ANN401 - a future of all
            bodies = ({"model": cluster.model} | body for body in STREAMS)
            return asyncio.gather(*(stream(client, body) for body in bodies))

        # Logits are rounded as the CPU sums rows in a batch of this size.
        quiet = [
            each | {"logprobs": pytest.approx(each["logprobs"], rel=1e-4, abs=1e-5)}
            for each in await streams()
        ]
        attacking = asyncio.create_task(attack_all(cluster, ports))
        while not attacking.done():
            assert await streams() == quiet
        await attacking
        assert await streams() == quiet
        assert (await client.get("/health")).status_code == 200
    assert pids <= {process.pid for process in processes(cluster)}  # none has died
    cluster.assert_nothing_held()
    logs = "".join(file.read_text(errors="replace") for file in cluster.log_dir.iterdir())
    assert "Traceback" not in logs
