"""Time of kernels on a GPU: the median over replays of a CUDA graph of several calls."""

import statistics
from collections.abc import Callable

import torch

REPLAYS = 9

Call = Callable[[], object]


def microseconds(call: Call, calls: int) -> float:
    """Of one `call`, which is captured `calls` times in a row."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / calls)
    return statistics.median(times)


def copy_bytes_per_second() -> float:
    """Bytes read and written per second by a large copy: what memory allows.

    NOTE: by a kernel; a copy of torch becomes a node of the graph that is a third slower.
    """
    source = torch.empty(2**28, dtype=torch.int32, device="cuda")
    goal = torch.empty_like(source)
    seconds = 1e-6 * microseconds(lambda: torch.neg(source, out=goal), 4)
    return float(2 * source.nbytes / seconds)
