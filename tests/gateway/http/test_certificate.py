"""TLS: what clients are shown, and that a renewed certificate disturbs nobody."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from gateway.base.settings import GatewaySettings
from gateway.http import certificate as certificate_module
from gateway.http.certificate import Certificate
from gateway.http.listener import listen_on
from gateway.prompt.served_model import ServedModel
from gateway.server import serve
from tests.eventually import eventually
from tests.gateway.conftest import ANSWERS, MODEL, tokens_of
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import EOS_ID
from tests.gateway.stream import join

BODY = {"model": MODEL, "prompt": "long", "temperature": 0, "max_tokens": 500}

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="makes its certificates with openssl"
)


class Pair:
    """A new certificate for 127.0.0.1, which signs itself, and its key."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir()
        self.chain, self.key = folder / "tls.crt", folder / "tls.key"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", *(options or ("-nodes",)),
             "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
             "-keyout", str(self.key), "-out", str(self.chain)],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip

    def trusted(self) -> ssl.SSLContext:
        """Of a client that knows this certificate and no other."""
        return ssl.create_default_context(cafile=str(self.chain))


def shows(certificate: Certificate, pair: Pair) -> bool:
    """Whether a handshake in memory ends with this pair's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = pair.trusted().wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    server = certificate.context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(2):
            for end in (client, server):
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLCertVerificationError:
        return False
    return client.version() is not None and client.getpeercert() is not None


@asynccontextmanager
async def serving(cluster: FakeCluster, model: Path, pair: Pair) -> AsyncIterator[str]:
    """The URL of a gateway with this pair's files."""
    settings = GatewaySettings(
        router=cluster.router.server.address, model=model, served_model_name=MODEL,
        tls_cert=pair.chain, tls_key=pair.key, grace_seconds=0.1,
    )  # fmt: skip
    listener = listen_on("127.0.0.1:0")
    stop = asyncio.Event()
    task = asyncio.create_task(serve(settings, ServedModel.load(settings), listener, stop))
    try:
        await asyncio.wait_for(cluster.router.announced.wait(), 20)
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        await asyncio.wait_for(task, 20)


async def test_renewed_under_a_stream(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_module, "LOOK_SECONDS", 0.05)
    pair, renewed = Pair(tmp_path / "pair"), Pair(tmp_path / "renewed")
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        serving(cluster, model_folder, pair) as url,
    ):
        old = httpx.AsyncClient(base_url=url, verify=pair.trusted(), timeout=30)
        new = httpx.AsyncClient(base_url=url, verify=renewed.trusted(), timeout=30)
        async with old, new:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await new.get("/version")
            cluster.first.plan.step_seconds = 0.5
            stream = asyncio.create_task(old.post("/v1/completions", json=BODY | {"stream": True}))
            await asyncio.wait_for(cluster.first.started.wait(), 20)
            with capture_logs() as said:
                renewed.key.replace(pair.key)
                # Looked at while only one of them is the new one.
                await eventually(lambda: "stays as it was" in str(said))
            shutil.copy(renewed.chain, pair.chain)
            async with asyncio.timeout(20):
                while True:
                    try:
                        assert (await new.get("/version")).status_code == 200
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.02)
            assert not stream.done()
            cluster.first.plan.step_seconds = 0.0
            reply = await new.post("/v1/completions", json=BODY)
            assert reply.json()["choices"][0]["text"] == ANSWERS["long"]
            assert join(await stream, chat=False)[0][0].text == ANSWERS["long"]
            # On the connection of its own, which it shook hands for with the old certificate.
            assert (await old.get("/version")).status_code == 200


def test_files_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    pair, renewed = Pair(tmp_path / "pair"), Pair(tmp_path / "renewed")
    old = Pair(tmp_path / "old")
    shutil.copy(pair.chain, old.chain)
    certificate = Certificate(pair.chain, pair.key)
    assert shows(certificate, old)
    assert not shows(certificate, renewed)
    with capture_logs() as said:
        certificate.reload()
        assert not said
        shutil.copy(renewed.chain, pair.chain)  # not the key that belongs to it
        certificate.reload()
        pair.key.write_text("no key")
        certificate.reload()
        pair.key.unlink()
        certificate.reload()
        certificate.reload()  # as the time before: nothing to say
        assert [entry["event"] for entry in said] == ["certificate stays as it was"] * 3
        assert shows(certificate, old)
        shutil.copy(renewed.key, pair.key)
        certificate.reload()
        assert said[-1]["event"] == "certificate read again"
    assert shows(certificate, renewed)
    assert not shows(certificate, old)


def test_files_of_secrets_are_links(tmp_path: Path) -> None:
    """As Kubernetes replaces them: both at once, by turning the link to their folder."""
    pair, renewed = Pair(tmp_path / "first"), Pair(tmp_path / "second")
    link = tmp_path / "data"
    link.symlink_to(pair.chain.parent)
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(link / name)
    certificate = Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")
    (tmp_path / "next").symlink_to(renewed.chain.parent)
    (tmp_path / "next").replace(link)
    assert shows(certificate, pair)
    certificate.reload()
    assert shows(certificate, renewed)


def test_wrong_from_the_beginning(model_folder: Path, tmp_path: Path) -> None:
    pair, other = Pair(tmp_path / "pair"), Pair(tmp_path / "other")
    locked = Pair(tmp_path / "locked", "-passout", "pass:secret")
    for chain, key in ((pair.chain, other.key), (pair.chain, tmp_path), (locked.chain, locked.key)):
        with pytest.raises(ValueError, match=str(key)):
            Certificate(chain, key)
    with pytest.raises(ValueError, match="belong together"):
        GatewaySettings(router="127.0.0.1:1", model=model_folder, tls_cert=pair.chain)
