"""What the gateway costs: streams held at a set rate, and time added before the first token.

    python -m bench.gateway_load --streams 1000 --rate 20 --record

The gateway runs on one core (--gateway-cpu) with `bench.serving.stub_cluster`; stub and clients
have the others. Everything that those are late with counts against the gateway. Two cases:

streams   so many at once, each fed at `rate` tokens a second: do they all keep up, how long are
          tokens on their way (from the stub's tick to the client), CPU and memory of it
ttft      requests of 1,000-token prompts at a fixed mean rate (Poisson), over connections that
          are kept, answered at once by the stub: the time to the first token is what the gateway
          adds. The same requests to `bench.serving.null_gateway`, which only answers, just
          before, say what of it is the machine's and the benchmark's own

With --tls the gateway and the stubs talk by mutual TLS.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import tokenizers
import uvloop

from bench.records import bench_parser, path_of, report
from bench.serving.prose import prose_prompts
from bench.serving.raw_streams import KeptConnections, RawStream
from bench.serving.stub_cluster import without_pauses
from loadgen.prompts import arrival_times
from loadgen.records import BenchRun, Record
from loadgen.summary import Figure, percentile

BENCH = "gateway"
CHAT = "/v1/chat/completions"
MODEL = "bench"
FLOOR = "null HTTP server, same core"
# One a stub worker: its output tells which one it comes from.
LETTERS = "abcd"
READY_SECONDS = 30.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# What the gateway starts beside its first requests is there by then.
SETTLE_SECONDS = 3.0
# So many at once. A gateway knows the words of its texts but for names and the like: after 2,000
# prompts two in a hundred are new, after 300 ten.
WARM_UP_AT_ONCE = 10


@dataclass(frozen=True, slots=True)
class Gateway:
    """The measured process."""

    pid: int
    address: tuple[str, int]

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    def memory_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(arguments: argparse.Namespace) -> Iterator[Gateway]:
    """Stub cluster and gateway, each on its cores. Raises RuntimeError when one does not start."""
    tokenizer = tokenizers.Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    _leave_core(arguments)
    files = certificate(arguments.tls) if arguments.tls else {}
    stub = subprocess.Popen(
        [sys.executable, "-m", "bench.serving.stub_cluster", "--rate", str(arguments.rate),
         "--workers", str(len(LETTERS)),
         "--token-ids", *(str(tokenizer.token_to_id(letter)) for letter in LETTERS),
         *(f"--tls-{name}={files[name]}" for name in ("cert", "key") if files)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert stub.stdout is not None
    router = stub.stdout.readline().strip()
    if not router:
        raise RuntimeError("the stub cluster did not start")
    try:
        with _serving(
            arguments, "gateway", "--router", router, "--model", str(arguments.model),
            "--served-model-name", MODEL, "--log-level", arguments.log_level,
            *(f"--cluster-tls-{name}={file}" for name, file in files.items()),
        ) as gateway:  # fmt: skip
            yield gateway
    finally:
        stub.communicate(timeout=10)


def certificate(folder: Path) -> dict[str, Path]:
    """One for all processes, which has signed itself, made by openssl in `folder`; by flag."""
    cert, key = folder / "tls.crt", folder / "tls.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=bench", "-addext", "subjectAltName=DNS:epserve",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return {"cert": cert, "key": key, "ca": cert}


@contextmanager
def running_null(arguments: argparse.Namespace) -> Iterator[Gateway]:
    """The gateway that does nothing, on the same core. Raises RuntimeError as `running`."""
    _leave_core(arguments)
    with _serving(arguments, "bench.serving.null_gateway") as gateway:
        yield gateway


def _leave_core(arguments: argparse.Namespace) -> None:
    """This process, and what it starts, is not to run on the gateway's core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores - {arguments.gateway_cpu} or cores)


@contextmanager
def _serving(arguments: argparse.Namespace, module: str, *options: str) -> Iterator[Gateway]:
    with tempfile.TemporaryFile() as output:
        gateway = subprocess.Popen(
            [sys.executable, "-m", module, "--listen", f"127.0.0.1:{arguments.port}", *options],
            preexec_fn=lambda: os.sched_setaffinity(0, {arguments.gateway_cpu}),
            stderr=output,
        )
        try:
            _wait_until_ready(arguments.port, gateway)
            yield Gateway(gateway.pid, ("127.0.0.1", arguments.port))
        finally:
            gateway.terminate()
            gateway.wait(10)


def _wait_until_ready(port: int, gateway: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and gateway.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except (URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError("the gateway did not start")


# ---- streams


def body_of(text: str, max_tokens: int) -> dict[str, object]:
    message = {"role": "user", "content": text}
    return {
        "model": MODEL, "messages": [message], "stream": True, "max_tokens": max_tokens,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip


async def measure_streams(gateway: Gateway, arguments: argparse.Namespace) -> list[Figure]:
    """Holds the streams for `seconds` once all are open."""
    rate, count, seconds = arguments.rate, arguments.streams, arguments.seconds
    memory_before = gateway.memory_bytes()
    max_tokens = int(rate * (arguments.ramp_seconds + seconds + 10))
    connections = KeptConnections(gateway.address)
    streams = [RawStream(CHAT, body_of("hello", max_tokens)) for _ in range(count)]
    for number, stream in enumerate(streams):
        await connections.send(stream)
        if number % 10 == 0:
            await asyncio.sleep(10 * arguments.ramp_seconds / count)
    await asyncio.sleep(SETTLE_SECONDS)
    without_pauses()
    began_at, cpu_before = time.monotonic(), gateway.cpu_seconds()
    await asyncio.sleep(seconds)
    cpu_seconds, ended_at = gateway.cpu_seconds() - cpu_before, time.monotonic()
    memory = gateway.memory_bytes() - memory_before
    num_lost = sum(stream.ended.done() for stream in streams)
    for stream in streams:
        stream.close()
    return _stream_figures(streams, arguments, (began_at, ended_at), cpu_seconds) + [
        Figure("streams_held", "streams", count - num_lost),
        Figure("memory_per_stream", "bytes", memory / count),
    ]


def _stream_figures(
    streams: Sequence[RawStream],
    arguments: argparse.Namespace,
    window: tuple[float, float],
    cpu_seconds: float,
) -> list[Figure]:
    """What arrived between the two times of `window`, for which the gateway took so much CPU."""
    began_at, ended_at = window
    rate = arguments.rate
    lags: list[float] = []
    writes: set[tuple[int, float]] = set()
    num_tokens = 0
    for number, stream in enumerate(streams):
        text, times = stream.arrivals()
        if len(text) < 2:
            raise RuntimeError(f"a stream that stands still: {stream.tail()}")
        num_tokens += sum(began_at <= at < ended_at for at in times)
        writes.update((number, at) for at in times if began_at <= at < ended_at)
        lags += [
            lag
            for lag, at in zip(lags_of(text, times, rate), times[1:], strict=True)
            if began_at <= at < ended_at
        ]
    asked = len(streams) * rate * (ended_at - began_at)
    return [
        Figure("throughput", "tokens/s", num_tokens / (ended_at - began_at)),
        Figure("delivered", "of what was asked", num_tokens / asked),
        Figure("core_throughput", "tokens/s", num_tokens / cpu_seconds),
        Figure("cpu_use", "cores", cpu_seconds / (ended_at - began_at)),
        Figure("tokens_per_write", "tokens", num_tokens / max(1, len(writes))),
        *(Figure(f"lag_p{at}", "s", percentile(lags, at)) for at in (50, 99)),
    ]


def lags_of(text: str, times: Sequence[float], rate: float) -> list[float]:
    """Seconds from the tick at which the worker had each token but the first to its arrival.

    Ticks are known but for a whole number of periods: the latest that is possible for all
    tokens of the stream is taken, which is right while any of them takes less than a period.
    """
    period = 1 / rate
    shift = LETTERS.index(text[0]) / len(LETTERS) * period
    least = min(at - number * period for number, at in enumerate(times[1:]))
    first = (least - shift) // period * period + shift
    return [at - number * period - first for number, at in enumerate(times[1:])]


# ---- time to first token


async def measure_ttft(gateway: Gateway, arguments: argparse.Namespace) -> list[Figure]:
    """Requests at random times; each is answered by the stub as soon as it is there."""
    tokenizer = tokenizers.Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    num_warm_up = arguments.warm_up_requests
    count = int(arguments.request_rate * arguments.seconds) + num_warm_up
    streams = [
        RawStream(CHAT, body_of(cut(tokenizer, text, arguments.prompt_tokens), 2))
        for text in prose_prompts(7, count, arguments.prompt_tokens)
    ]
    connections = KeptConnections(gateway.address)

    async def request(number: int) -> None:
        await connections.send(streams[number])
        await streams[number].ended

    for first in range(0, num_warm_up, WARM_UP_AT_ONCE):
        together = range(first, min(first + WARM_UP_AT_ONCE, num_warm_up))
        await asyncio.gather(*map(request, together))
    await asyncio.sleep(SETTLE_SECONDS)
    without_pauses()
    cpu_before = gateway.cpu_seconds()
    times = arrival_times(7, count - num_warm_up, arguments.request_rate)
    tasks: list[asyncio.Task[None]] = []
    await on_time(
        times,
        lambda number: tasks.append(asyncio.create_task(request(num_warm_up + number))),
    )
    await asyncio.gather(*tasks)
    cpu_seconds = gateway.cpu_seconds() - cpu_before
    connections.close()
    ttfts = []
    for stream in streams[num_warm_up:]:
        _, times = stream.arrivals()
        if not times:
            raise RuntimeError(f"a request without tokens: {stream.tail()}")
        ttfts.append(times[0] - stream.sent_at)
    return [
        *(Figure(f"added_ttft_p{at}", "s", percentile(ttfts, at)) for at in (50, 99)),
        Figure("cpu_per_request", "s", cpu_seconds / len(ttfts)),
    ]


async def on_time(times: Sequence[float], begin: Callable[[int], None]) -> None:
    """Calls `begin` with the number of each of `times`, in seconds from now, when it has come.

    From a thread: timers of event loops go by whole milliseconds, and would turn requests that
    follow each other into ones that come together.
    """
    loop = asyncio.get_running_loop()
    began_at = time.monotonic()

    def pace() -> None:
        for number, at in enumerate(times):
            time.sleep(max(0.0, began_at + at - time.monotonic()))
            loop.call_soon_threadsafe(begin, number)

    await asyncio.to_thread(pace)


def cut(tokenizer: tokenizers.Tokenizer, text: str, num_tokens: int) -> str:
    """The beginning of `text` that makes so many tokens."""
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    return text[: offsets[num_tokens - 1][1]]


# ---- command line


def measure(run: BenchRun, arguments: argparse.Namespace) -> Iterator[Record]:
    """Each case with a gateway of its own."""
    legs = ", legs with mutual TLS" if arguments.tls else ""
    if arguments.only in ("", "streams"):
        case = f"{arguments.streams} streams of {arguments.rate:g} tokens/s, gateway on one core"
        case += legs
        with running(arguments) as gateway:
            for figure in uvloop.run(measure_streams(gateway, arguments)):
                yield run.record(case, *figure)
    if arguments.only in ("", "ttft"):
        case = (
            f"{arguments.request_rate:g} requests/s of {arguments.prompt_tokens} prompt tokens, "
            f"gateway on one core{legs}"
        )
        with running_null(arguments) as gateway:
            figures = uvloop.run(measure_ttft(gateway, arguments))
            floor = {figure.metric: figure.value for figure in figures}
        with running(arguments) as gateway:
            for figure in uvloop.run(measure_ttft(gateway, arguments)):
                peer_value = floor[figure.metric]
                yield run.record(case, *figure, peer=FLOOR, peer_value=peer_value)


def main(argv: Sequence[str]) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", type=Path, default=Path("demo_model/checkpoint"))
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens/s of each stream")
    parser.add_argument("--ramp-seconds", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each case")
    parser.add_argument("--request-rate", type=float, default=100.0)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--warm-up-requests", type=int, default=2000, help="of the case ttft")
    parser.add_argument("--gateway-cpu", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--port", type=int, default=21900)
    parser.add_argument("--log-level", default="warning", help="of the gateway")
    parser.add_argument("--tls", type=Path, metavar="FOLDER", help="for the legs' certificate")
    parser.add_argument("--only", choices=["", "streams", "ttft"], default="")
    arguments = parser.parse_args(argv)
    report(measure(BenchRun.begin(BENCH, on_cpu=True), arguments), path_of(BENCH, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
