"""What a cluster holds after hours of nasty requests: memory, descriptors, tasks and threads.

    python -m bench.soak --minutes 120 --record

A demo cluster on this machine's CPU. Plain streams run all the time; beside them come, at a fixed
rate, requests that are all unlike each other (`bench.serving.nasty_traffic`) and, at every port,
bytes that are none (`bench.serving.attacks`). Once a minute a line tells what each process holds;
`bench.pictures.soak` draws them. The records compare the last quarter of the time with the second,
which begins when caches have filled up: the KV pools, whose memory is only taken when it is first
written to, are small for that.
"""

import argparse
import asyncio
import itertools
import json
import re
import signal
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from bench.records import bench_parser, path_of, report, say
from bench.serving.attacks import make_attack
from bench.serving.local_cluster import local_cluster
from bench.serving.nasty_traffic import Manner, NastyRequest, NastyTraffic
from loadgen.openai_stream import StreamError, Target, stream
from loadgen.records import BenchRun, Record
from loadgen.summary import percentile

BENCH = "soak"
ANSWER_SECONDS = 60.0
MAX_AT_ONCE = 64
ATTACK_SECONDS = 0.2
# Of what is recorded. CPU time is in the lines alone.
UNITS = {
    "rss_bytes": "MB", "anonymous_bytes": "MB", "fds": "descriptors", "threads": "threads",
    "tasks": "tasks",
}  # fmt: skip
_TASKS = re.compile(r"^epserve_gateway_tasks\S* (\S+)", re.MULTILINE)
_STATUS = re.compile(rb"^HTTP/1\.1 (\d+)", re.MULTILINE)
_RESPONSE_ID = re.compile(rb'"id":"(resp_\w+)"')

Held = dict[str, dict[str, float]]


def held(url: str) -> Held:
    """What each process of the cluster that this one has started holds, by its name; those of one
    name together."""
    found: Held = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):
            for quantity, value in _of(process).items():
                sums = found.setdefault(_name(process), {})
                sums[quantity] = sums.get(quantity, 0) + value
    found.setdefault("gateway", {})["tasks"] = _num_tasks(url)
    return found


def _name(process: psutil.Process) -> str:
    """Of its module: "decode ranks" for `decode_worker.rank`."""
    command: list[str] = process.cmdline() or [process.name()]  # one that has ended has none
    if "-m" not in command:
        return Path(command[0]).name
    package, _, module = command[command.index("-m") + 1].rpartition(".")
    if module == "rank":
        return f"{package.removesuffix('_worker')} ranks"
    return module.replace("_", " ")


def _of(process: psutil.Process) -> dict[str, float]:
    text = Path(f"/proc/{process.pid}/status").read_text()
    anonymous = re.search(r"RssAnon:\s+(\d+) kB", text)
    memory = process.memory_info().rss
    return {
        "rss_bytes": memory,
        "anonymous_bytes": int(anonymous[1]) * 1024 if anonymous else memory,
        "fds": process.num_fds(),
        "threads": process.num_threads(),
        "cpu_seconds": sum(process.cpu_times()[:2]),
    }


def _num_tasks(url: str) -> float:
    with suppress(OSError), urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        return sum(map(float, _TASKS.findall(reply.read().decode())))
    return 0.0


class Traffic:
    """`answers` counts them by status."""

    def __init__(self, url: str, arguments: argparse.Namespace) -> None:
        self._target = Target.parse(url)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
            self._model = json.load(reply)["data"][0]["id"]
        self._arguments = arguments
        self._requests = NastyTraffic(arguments.seed, self._model)
        self._response_id: str | None = None
        self._ports = _ports()
        self.answers: Counter[str] = Counter()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._arguments.streams):
                group.create_task(self._plain())
            group.create_task(self._nasty())
            group.create_task(self._attacks())

    async def _plain(self) -> None:
        body = {"model": self._model, "prompt": "One day", "max_tokens": 40, "ignore_eos": True}
        while True:
            try:
                await stream(self._target, "/v1/completions", body, {})
                self.answers["plain"] += 1
            except (OSError, StreamError) as error:
                say(f"a plain stream failed: {error}")
                self.answers["plain failed"] += 1
            await asyncio.sleep(self._arguments.pause_seconds)

    async def _nasty(self) -> None:
        running: set[asyncio.Task[None]] = set()
        while True:
            if len(running) < MAX_AT_ONCE:
                task = asyncio.create_task(self._send(self._requests.make(self._response_id)))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(1 / self._arguments.rate)

    async def _send(self, request: NastyRequest) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                status = await self._exchange(request)
        except (OSError, TimeoutError) as error:
            status = type(error).__name__
        self.answers[status] += 1

    async def _exchange(self, request: NastyRequest) -> str:
        """The status of the answer, as far as the manner of the request lets one see it."""
        reader, writer = await asyncio.open_connection(
            self._target.host, self._target.port, local_addr=(request.source, 0)
        )
        try:
            writer.write(request.data)
            if request.manner is Manner.HALF_CLOSED:
                writer.write_eof()
            if request.manner is Manner.CUT:
                await asyncio.sleep(ATTACK_SECONDS)
                return "cut"
            answer = await reader.read(2**14)
            if request.manner is Manner.ABORTED:
                return "aborted"
            answer += await reader.read()
            if found := _RESPONSE_ID.search(answer):
                self._response_id = found[1].decode()
            return max(_STATUS.findall(answer), default=b"none").decode()  # past 100 Continue
        finally:
            writer.transport.abort()

    async def _attacks(self) -> None:
        """Bytes at every port, one attack after the other."""
        for seed in itertools.count(self._arguments.seed):
            attack = make_attack(seed, self._model)
            port = self._target.port if attack.is_http else self._ports[seed % len(self._ports)]
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(ATTACK_SECONDS):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    try:
                        writer.writelines(attack.pieces)
                        while await reader.read(2**16):
                            pass
                    finally:
                        writer.transport.abort()
            await asyncio.sleep(1 / self._arguments.rate)


def _ports() -> list[int]:
    """All that processes of this one's cluster listen at."""
    found = {
        connection.laddr.port
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    return sorted(found)


async def soak(url: str, arguments: argparse.Namespace, path: Path) -> list[dict[str, Any]]:
    """Minute by minute: what is held, what was answered; each is appended to `path` at once.
    SIGTERM ends it early."""
    traffic = Traffic(url, arguments)
    running = asyncio.create_task(traffic.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    began = time.monotonic()
    minutes: list[dict[str, Any]] = []
    while (seconds := time.monotonic() - began) < 60 * arguments.minutes and not running.done():
        answers, traffic.answers = dict(traffic.answers), Counter()
        now_held = await asyncio.to_thread(held, url)
        line = {"seconds": round(seconds), "answers": answers, "held": now_held}
        minutes.append(line)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        sizes = {name: f"{of['rss_bytes'] / 2**20:.0f}" for name, of in now_held.items()}
        say(f"{seconds / 60:.1f} min, {answers}, MB: {sizes}")
        await asyncio.wait([running], timeout=arguments.every_seconds)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return minutes


def records(run: BenchRun, minutes: Sequence[dict[str, Any]], case: str) -> Iterator[Record]:
    """What each process held in the last quarter, beside what it held in the second: medians."""
    quarter = len(minutes) // 4
    for name, last in minutes[-1]["held"].items():
        for quantity in UNITS.keys() & last.keys():
            before, after = (
                percentile([line["held"].get(name, {}).get(quantity, 0.0) for line in part], 50)
                / (2**20 if UNITS[quantity] == "MB" else 1)
                for part in (minutes[quarter : 2 * quarter], minutes[-quarter:])
            )
            metric = f"{name}: {quantity.removesuffix('_bytes')}"
            yield run.record(
                case, metric, UNITS[quantity], after, peer="second quarter", peer_value=before
            )


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=2.0, help="nasty requests a second")
    parser.add_argument("--streams", type=int, default=2, help="plain ones at a time")
    parser.add_argument("--pause-seconds", type=float, default=3.0, help="between two plain ones")
    parser.add_argument("--every-seconds", type=float, default=60.0, help="a line")
    parser.add_argument("--kv-pages", type=int, default=1024, help="of each rank")
    parser.add_argument("--seed", type=int, default=26)
    parser.add_argument("--details", type=Path, help="lines; default: beside the records")
    arguments = parser.parse_args(argv)
    path = arguments.details or arguments.results / "details" / f"{BENCH}.jsonl"
    path.unlink(missing_ok=True)
    run = BenchRun.begin(BENCH, on_cpu=True)
    with local_cluster(["--kv-pages", str(arguments.kv_pages)]) as url:
        minutes = asyncio.run(soak(url, arguments, path))
    case = f"{arguments.minutes:g} minutes, {arguments.rate:g} nasty requests/s"
    report(records(run, minutes, case), path_of(BENCH, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
