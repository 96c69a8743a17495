"""Time of kernels on a GPU: the median over replays of a CUDA graph of several calls.

What is compared is replayed in turns: a device that has rested is faster than one at its power
limit, so that which of two is measured first would decide.

Of what power binds, turns without a rest say which takes fewer cycles: the device's clock is that
of all of them together, so that one that draws more is faster than it could be by itself, at the
cost of the others. `rested` and `sustained` give each its own power.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import torch

REPLAYS = 9
REST_SECONDS = 0.02
SUSTAINED_SECONDS = 1.0

Call = Callable[[], object]
Replay = Callable[[], float]


def captured(call: Call, calls: int) -> Replay:
    """Gives microseconds of one `call`, of a graph of `calls` in a row."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()

    def replay(_kept: Call = call) -> float:  # whose operands the graph reads
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return 1000 * float(begin.elapsed_time(end)) / calls

    return replay


def in_turns(*compared: Replay) -> list[float]:
    """Of each the median, but for the first, which warms up."""
    rounds = [[replay() for replay in compared] for _ in range(1 + REPLAYS)][1:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def rested(*compared: Replay) -> list[float]:
    """As `in_turns`, each after a rest: the device's clock is the highest that it has."""

    def after_rest(replay: Replay) -> Replay:
        def rest_and_replay() -> float:
            time.sleep(REST_SECONDS)
            return replay()

        return rest_and_replay

    return in_turns(*map(after_rest, compared))


def sustained(*compared: Replay, seconds: float = SUSTAINED_SECONDS) -> list[float]:
    """Of each the median of what it takes at the end, once the device has found its clock: for so
    many seconds nothing else runs, twice in turns."""
    found: list[list[float]] = [[] for _ in compared]
    for _ in range(2):
        for replay, times in zip(compared, found, strict=True):
            times += _settled(replay, seconds)
    return [statistics.median(times) for times in found]


def _settled(replay: Replay, seconds: float) -> Iterator[float]:
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < seconds:
        taken = replay()
        if passed > seconds / 2:
            yield taken


def microseconds(call: Call, calls: int) -> float:
    """Of one `call`, which is captured `calls` times in a row."""
    return in_turns(captured(call, calls))[0]


def copy_bytes_per_second() -> float:
    """Bytes read and written per second by a large copy: what memory allows.

    NOTE: by a kernel; a copy of torch becomes a node of the graph that is a third slower.
    """
    source = torch.empty(2**28, dtype=torch.int32, device="cuda")
    goal = torch.empty_like(source)
    seconds = 1e-6 * microseconds(lambda: torch.neg(source, out=goal), 4)
    return float(2 * source.nbytes / seconds)
