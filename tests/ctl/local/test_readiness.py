"""When `ctl up` takes a process for one that serves."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from ctl.local.process_spec import ProcessSpec
from ctl.local.readiness import wait_until_ready


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
