"""Who belongs to a cluster is let in, others are not; renewed files disturb nobody."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from core.errors import Unavailable
from ctl.base.cluster_access import ClusterAccess
from proto import generate_pb2, generate_pb2_grpc
from proto.generate_pb2 import GenerateRequest, GenerateResponse, PrefillRequest, PrefillResponse
from proto.generate_pb2_grpc import DecodeStub, PrefillStub
from rpc import cluster_credentials
from rpc.client import Disconnected, channel, to_error
from rpc.cluster_credentials import ClusterCredentials, load
from rpc.multiplex_client import MultiplexClient
from rpc.server import RpcServer
from tests.certificates import Authority, needs_openssl
from tests.eventually import eventually

GENERATE = "/epserve.generate.v1.Decode/Generate"
SECONDS = 20.0
Context = grpc.aio.ServicerContext[Any, Any]


class Worker(generate_pb2_grpc.PrefillServicer, generate_pb2_grpc.DecodeServicer):
    """Its streams go on when they are told to."""

    def __init__(self) -> None:
        self.more = asyncio.Event()
        self.num_calls = 0

    async def Prefill(self, request: PrefillRequest, context: Context) -> PrefillResponse:
        self.num_calls += 1
        return PrefillResponse()

    async def Generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[GenerateResponse]:
        self.num_calls += 1
        yield GenerateResponse(rank=1)
        await self.more.wait()
        yield GenerateResponse(rank=2)


@asynccontextmanager
async def serving(credentials: ClusterCredentials) -> AsyncIterator[tuple[str, Worker]]:
    worker = Worker()
    server = RpcServer("127.0.0.1:0", credentials=credentials)
    for role in ("Prefill", "Decode"):
        register = getattr(generate_pb2_grpc, f"add_{role}Servicer_to_server")
        server.add(register, worker, generate_pb2, role)
    await server.start()
    try:
        yield server.address, worker
    finally:
        await server.stop(0)


def token(tmp_path: Path, words: str, name: str = "token") -> ClusterAccess:
    file = tmp_path / name
    file.write_text(words)
    return ClusterAccess(cluster_token_file=file)


async def prefill(address: str, credentials: ClusterCredentials) -> None:
    """One call. Raises what the server, or the lack of one, means."""
    async with channel(address, credentials) as peer:
        try:
            await PrefillStub(peer).Prefill(PrefillRequest(), timeout=SECONDS)
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error


async def all_kinds(address: str, credentials: ClusterCredentials) -> list[str]:
    """The status of a call of each kind: one answer, a stream, a session of many, reflection."""
    codes = []
    async with channel(address, credentials) as peer:
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        reflecting = reflection_pb2_grpc.ServerReflectionStub(peer).ServerReflectionInfo(
            iter([asked]), timeout=SECONDS
        )
        for first in (
            PrefillStub(peer).Prefill(PrefillRequest(), timeout=SECONDS),
            DecodeStub(peer).Generate(GenerateRequest(), timeout=SECONDS).read(),
            reflecting.read(),
            # A method that is not there: a stranger does not learn that.
            peer.unary_unary("/epserve.generate.v1.Decode/None")(b"", timeout=SECONDS),
        ):
            try:
                await first
                codes.append("OK")
            except grpc.aio.AioRpcError as error:
                codes.append(error.code().name)
    return codes


@pytest.mark.parametrize("given", [None, "other", "sesam", "sesame2"])
async def test_who_does_not_know_the_token_is_refused(tmp_path: Path, given: str | None) -> None:
    stranger = load(ClusterAccess() if given is None else token(tmp_path, given, "other"))
    ours = load(token(tmp_path, "sesame\n"))
    async with serving(ours) as (address, worker):
        assert await all_kinds(address, stranger) == ["UNAUTHENTICATED"] * 4
        assert worker.num_calls == 0
        # As a peer that is not there: tried elsewhere, and no client's own key is to blame.
        with pytest.raises(Disconnected, match="cluster's token"):
            await prefill(address, stranger)
        assert await all_kinds(address, ours) == ["OK", "OK", "OK", "UNIMPLEMENTED"]


@pytest.mark.parametrize(
    "metadata",
    [
        [("x-epserve-cluster-token", "sesame"), ("x-epserve-cluster-token", "sesame")],
        [("x-epserve-cluster-token", "")],
        [("x-epserve-cluster-token-bin", b"sesame")],
        [("authorization", "Bearer sesame")],
    ],
)
async def test_only_the_tokens_own_place_counts(tmp_path: Path, metadata: list[Any]) -> None:
    async with (
        serving(load(token(tmp_path, "sesame"))) as (address, _),
        channel(address, ClusterCredentials()) as peer,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await PrefillStub(peer).Prefill(PrefillRequest(), metadata=metadata, timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_is_told_to_everybody(tmp_path: Path) -> None:
    async with (
        serving(load(token(tmp_path, "sesame"))) as (address, _),
        channel(address, ClusterCredentials()) as peer,
    ):
        request = health_pb2.HealthCheckRequest()
        reply = await health_pb2_grpc.HealthStub(peer).Check(request, timeout=SECONDS)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_server_that_takes_all_calls(tmp_path: Path) -> None:
    ours = load(token(tmp_path, "sesame"), takes_all=True)
    async with serving(ours) as (address, _):
        await prefill(address, ClusterCredentials())
        await prefill(address, ours)


async def test_a_token_is_replaced_without_a_refusal(tmp_path: Path) -> None:
    """First everybody takes the new word, then everybody sends it, then the old one goes."""
    old, new = load(token(tmp_path, "old", "a")), load(token(tmp_path, "old", "b"))
    async with serving(old) as (address, _):
        for server, client in (("old\nnew", "old"), ("old\nnew", "new\nold"), ("new", "new")):
            token(tmp_path, server, "a")
            token(tmp_path, client, "b")
            await prefill(address, new)
        token(tmp_path, "old", "b")
        with pytest.raises(Disconnected):
            await prefill(address, new)


async def test_a_session_carries_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = load(token(tmp_path, "sesame"))
    async with serving(ours) as (address, worker):
        worker.more.set()
        for used, is_in in ((ours, True), (ClusterCredentials(), False)):
            monkeypatch.setattr(cluster_credentials, "_used", used)
            client = MultiplexClient(address, peer_epoch="epoch-1")
            with client.call(GENERATE, b"", timeout_seconds=SECONDS) as call:
                if is_in:
                    assert await call.take()
                else:
                    with pytest.raises(Unavailable) as caught:
                        await call.take()
                    assert caught.value.failed_epoch == "epoch-1"
            await client.close()


@needs_openssl
async def test_both_sides_show_a_certificate_of_the_same_authority(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours").access()
    other = Authority(tmp_path / "other").access()
    async with serving(load(ours)) as (address, worker):
        await prefill(address, load(ours))
        mixed = (
            other,
            ClusterAccess(),  # speaks no TLS
            replace(other, cluster_tls_ca=ours.cluster_tls_ca),  # the server does not know us
            replace(ours, cluster_tls_ca=other.cluster_tls_ca),  # we do not know the server
            replace(ours, cluster_tls_name="another"),
        )
        for stranger in mixed:
            with pytest.raises(Disconnected):
                await prefill(address, load(stranger))
        assert worker.num_calls == 1
    # Nor is a server of ours talked to that speaks no TLS.
    async with serving(ClusterCredentials()) as (address, _):
        with pytest.raises(Disconnected):
            await prefill(address, load(ours))


@needs_openssl
async def test_certificates_and_token_together(tmp_path: Path) -> None:
    tls = Authority(tmp_path / "ours").access()
    both = replace(tls, cluster_token_file=token(tmp_path, "sesame").cluster_token_file)
    async with serving(load(both)) as (address, _):
        await prefill(address, load(both))
        with pytest.raises(Disconnected, match="cluster's token"):
            await prefill(address, load(tls))


@needs_openssl
async def test_renewed_files_are_used_while_a_stream_runs(tmp_path: Path) -> None:
    """Authority and certificates are all replaced: who connects later needs the new ones, what is
    connected goes on, on the connection that it has."""
    before = Authority(tmp_path / "before").access()
    after = Authority(tmp_path / "after").access()
    ours = ClusterAccess(
        cluster_tls_cert=tmp_path / "tls.crt",
        cluster_tls_key=tmp_path / "tls.key",
        cluster_tls_ca=tmp_path / "ca.crt",
    )
    install(before, ours)
    credentials = load(ours)
    async with serving(credentials) as (address, worker), channel(address, credentials) as peer:
        stub = DecodeStub(peer)
        stream = stub.Generate(GenerateRequest(), timeout=SECONDS)
        assert (await stream.read()).rank == 1
        install(after, ours)
        await prefill(address, load(after))
        with pytest.raises(Disconnected):
            await prefill(address, load(before))
        # The same channel, and stub, as before.
        await PrefillStub(peer).Prefill(PrefillRequest(), timeout=SECONDS)
        again = stub.Generate(GenerateRequest(), timeout=SECONDS)
        assert (await again.read()).rank == 1
        gc.collect()
        worker.more.set()
        assert (await stream.read()).rank == 2
        assert (await again.read()).rank == 2
        assert await stream.code() is await again.code() is grpc.StatusCode.OK


@needs_openssl
async def test_files_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours").access()
    credentials = load(ours)
    assert ours.cluster_tls_key is not None
    key = ours.cluster_tls_key.read_bytes()
    async with serving(credentials) as (address, _):
        for content in (b"", Authority(tmp_path / "other").access().cluster_tls_key.read_bytes()):  # type: ignore[union-attr]
            ours.cluster_tls_key.write_bytes(content)
            with capture_logs() as said:
                await prefill(address, credentials)
            assert "stays as it was" in said[0]["event"]
            with pytest.raises(ValueError, match=r"tls\.key"):
                load(ours)
        ours.cluster_tls_key.write_bytes(key)
        await prefill(address, credentials)


@pytest.mark.parametrize("missing", ["cert", "key", "ca"])
def test_the_three_files_belong_together(tmp_path: Path, missing: str) -> None:
    names = {f"cluster_tls_{name}": tmp_path / name for name in ("cert", "key", "ca")}
    del names[f"cluster_tls_{missing}"]
    with pytest.raises(ValueError, match="belong together"):
        load(ClusterAccess(**names))  # type: ignore[arg-type]


@needs_openssl
async def test_a_lost_connection_is_seen(tmp_path: Path) -> None:
    credentials = load(Authority(tmp_path / "ours").access())
    async with serving(credentials) as (address, _):
        peer = channel(address, credentials)
        await peer.channel_ready()
        assert peer.get_state() is grpc.ChannelConnectivity.READY
    await asyncio.wait_for(peer.wait_for_state_change(grpc.ChannelConnectivity.READY), SECONDS)
    await eventually(lambda: peer.get_state() is not grpc.ChannelConnectivity.READY)
    await peer.close()


def install(source: ClusterAccess, target: ClusterAccess) -> None:
    for name in ("cluster_tls_ca", "cluster_tls_cert", "cluster_tls_key"):
        getattr(target, name).write_bytes(getattr(source, name).read_bytes())
