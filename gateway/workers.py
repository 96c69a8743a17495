"""Several gateway processes on one port: started, watched, started again, stopped together.

Each process listens for itself (SO_REUSEPORT: the kernel spreads connections over them) and has
its own tokenizer, connections and bounds. They share metrics and rate limits, in a folder.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from core.address import Address, parse_address
from core.log import get_logger
from core.metrics import serve as serve_metrics
from core.signals import stop_event
from gateway.base.metrics import SHARED_FOLDER_VARIABLE
from gateway.base.settings import GatewaySettings
from gateway.beats import until_stuck
from gateway.http.listener import listen_on
from gateway.worker import CANNOT_START

log = get_logger("gateway.workers")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
# A process that has run for so long is started again without a pause.
STEADY_SECONDS = 10.0
# After the grace that running requests get.
EXIT_SECONDS = 3.0


def run_workers(settings: GatewaySettings) -> int:
    """Exit status 0 after a stop by signal, 1 when the processes cannot start. Raises OSError
    when the address is taken."""
    with (
        tempfile.TemporaryDirectory(prefix="epserve-gateway-") as folder,
        # Bound, never listening: it holds the port while processes come and go.
        listen_on(settings.listen, shared=True) as holder,
        asyncio.Runner() as runner,
    ):
        port: int = holder.getsockname()[1]
        address = Address(parse_address(settings.listen).host, port)
        return runner.run(_Workers(settings, address, Path(folder)).run())


class _Workers:
    def __init__(self, settings: GatewaySettings, address: Address, folder: Path) -> None:
        self._settings = settings
        self._address = address
        self._folder = folder
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    async def run(self) -> int:
        stop = stop_event()
        registry = CollectorRegistry()
        path = str(self._folder)
        MultiProcessCollector(registry, path=path)  # type: ignore[no-untyped-call]
        metrics_server = serve_metrics(self._settings.metrics_port, registry, self._address.host)
        keeping = [asyncio.create_task(self._keep(i)) for i in range(self._settings.workers)]
        stopping = asyncio.create_task(stop.wait())
        try:
            # One that returns cannot be started.
            await asyncio.wait({*keeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return 0 if stop.is_set() else 1
        finally:
            for task in (*keeping, stopping):
                task.cancel()
            await asyncio.gather(*keeping, stopping, return_exceptions=True)
            await self._end_all()
            metrics_server.close()

    async def _keep(self, index: int) -> None:
        """Starts a process again and again; returns when it says that it cannot start."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_SECONDS
        while True:
            started_at = loop.time()
            process = await self._start(index)
            watching = asyncio.create_task(self._end_if_stuck(index, process))
            try:
                status = await process.wait()
            finally:
                watching.cancel()
            mark_process_dead(process.pid, str(self._folder))  # type: ignore[no-untyped-call]
            log.error("worker process ended", worker=index, pid=process.pid, status=status)
            if status == CANNOT_START:
                return
            if loop.time() - started_at > STEADY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _end_if_stuck(self, index: int, process: asyncio.subprocess.Process) -> None:
        """The kernel would go on to give it connections."""
        await until_stuck(self._folder, process.pid)
        log.error("worker process does nothing", worker=index, pid=process.pid)
        process.kill()

    async def _start(self, index: int) -> asyncio.subprocess.Process:
        values = self._settings.model_dump(mode="json") | {
            "name": f"{self._settings.name or 'gateway'}-{index}",
            "listen": str(self._address),
            "workers": 1,
            "metrics_port": -1,
            "shared_folder": str(self._folder),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.worker", str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            env=os.environ | {SHARED_FOLDER_VARIABLE: str(self._folder)},
        )  # fmt: skip
        self._processes[index] = process
        # Through a pipe: neither arguments nor environment show the keys.
        assert process.stdin is not None
        process.stdin.write(json.dumps(values).encode())
        process.stdin.close()
        log.info("worker process started", worker=index, pid=process.pid)
        return process

    async def _end_all(self) -> None:
        """SIGTERM, time to drain, then SIGKILL."""
        running = [one for one in self._processes.values() if one.returncode is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        waiting = [asyncio.create_task(process.wait()) for process in running]
        if waiting:
            await asyncio.wait(waiting, timeout=self._settings.grace_seconds + EXIT_SECONDS)
        for process in running:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*waiting)
