"""When `ctl up` takes a process for one that serves."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ctl.local.process_spec import ProcessSpec
from ctl.local.readiness import until_silent, wait_until_ready


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    writer.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
@pytest.mark.parametrize("by_flag", [True, False])
async def test_gateway_with_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, by_flag: bool
) -> None:
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=gateway"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    if not by_flag:
        monkeypatch.setenv("EPSERVE_TLS_CERT", str(certificate))
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        spec = ProcessSpec(
            name="gateway",
            role="gateway",
            address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}",
            flags={"tls-cert": str(certificate)} if by_flag else {},
        )
        async with asyncio.timeout(30):
            await wait_until_ready(spec)


@pytest.mark.parametrize("role", ["gateway", "router"])
async def test_who_answers_nothing_is_silent(role: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel takes connections, as that of a frozen process does."""
    monkeypatch.setattr("ctl.local.readiness._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("ctl.local.readiness._NUM_UNANSWERED", 2)

    async def frozen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(frozen, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(30):
            await until_silent(ProcessSpec(name=role, role=role, address=address))


async def test_who_refuses_or_leaves_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctl.local.readiness._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("ctl.local.readiness._NUM_UNANSWERED", 2)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        asking = asyncio.create_task(
            until_silent(ProcessSpec(name="gateway", role="gateway", address=address))
        )
        await asyncio.sleep(0.5)
    await asyncio.sleep(0.5)  # closed: its last streams end
    assert not asking.done()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
