"""Who exists, told apart from who answers."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from decode_worker.liveness import Liveness
from tests.free_ports import free_port

LISTENS = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
while True:
    time.sleep(60)
"""


async def test_a_stopped_process_is_there_until_it_is_killed() -> None:
    port = free_port()
    liveness = Liveness(f"127.0.0.1:{port}")
    assert not await liveness.is_there()
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENS, str(port)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        os.kill(process.pid, signal.SIGSTOP)
        assert await liveness.is_there()
        assert all(await asyncio.gather(*(liveness.is_there() for _ in range(5))))
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
    async with asyncio.timeout(10):
        while await liveness.is_there():
            await asyncio.sleep(0.01)
    liveness.close()


async def test_one_connection_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        liveness = Liveness(f"127.0.0.1:{server.getsockname()[1]}")
        for _ in range(3):
            assert await liveness.is_there()
        server.settimeout(5)
        server.accept()[0].close()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
        liveness.close()


@pytest.mark.parametrize("host", ["nobody.invalid", "a" * 64 + ".invalid"])
async def test_a_name_that_nobody_has(host: str) -> None:
    assert not await Liveness(f"{host}:1").is_there()


async def test_all_who_ask_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is gone, or a full queue of connections, says nothing at all."""
    monkeypatch.setattr("decode_worker.liveness.CONNECT_SECONDS", 0.5)
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(server.getsockname())
        liveness = Liveness(f"127.0.0.1:{server.getsockname()[1]}")
        async with asyncio.timeout(5):
            assert not any(await asyncio.gather(*(liveness.is_there() for _ in range(20))))
        liveness.close()
