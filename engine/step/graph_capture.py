"""How a decode step is recorded once and repeated: by a CUDA graph, or by calling it again.

capture = CudaCapture(device)
replay = capture(step)         # runs `step` to warm up, records it
replay()                       # the same kernels, with what is in their tensors by then
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from core.log import get_logger

log = get_logger("engine.graph_capture")

Step = Callable[[], None]

# The first call compiles and allocates; the second finds what the first has left.
NUM_WARM_UPS = 2
GIB = 1 << 30


class Capture(Protocol):
    """Several captures of one object share their memory: only one of their steps may be under
    way, and what one has left in memory that it allocated is gone with the next."""

    def __call__(self, step: Step) -> Step:
        """What repeats `step`. All ranks of a group capture the same steps in the same order:
        `step` is called as often on all of them."""

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without holding it: for what one capture leaves to others, which take
        what was free when they were made."""

    def num_bytes(self) -> int:
        """Memory of the device that all captures hold together."""


class RepeatedCall:
    """Records nothing: the path for devices without graphs, with the same padding and buffers."""

    def __call__(self, step: Step) -> Step:
        step()
        return step

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def num_bytes(self) -> int:
        return 0


class CudaCapture:
    """Graphs of one memory pool, on a stream of their own while they are recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._driver_bytes = 0  # what graphs take beside their pool

    def __call__(self, step: Step) -> Step:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                step()
        self._stream.synchronize()
        before = self._bytes_beside_torch()
        graph = torch.cuda.CUDAGraph()
        # NOTE: other threads (NCCL's watchdog, NIXL) call CUDA meanwhile, which must not spoil it.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._driver_bytes += max(0, self._bytes_beside_torch() - before)
        replay: Step = graph.replay
        return replay

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous()
        bits = torch.as_tensor(_Memory(tensor.data_ptr(), tensor.nbytes), device=self._device)
        return bits.view(tensor.dtype).view(tensor.shape)

    def num_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()
        pool = sum(
            segment["total_size"]
            for segment in segments
            if tuple(segment["segment_pool_id"]) == tuple(self._pool)
        )
        return int(pool) + self._driver_bytes

    def _bytes_beside_torch(self) -> int:
        """Of the device, held by anybody; what torch keeps for later comes and goes."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes - torch.cuda.memory_reserved(self._device)


def capture_sizes(
    what: str, sizes: Sequence[int], record: Callable[[int], None], capture: Capture
) -> None:
    """`record` of each size, the largest first: the others fit into its memory. A line after each
    says what of `what` is recorded, how long all took so far, and what `capture` holds."""
    began = time.monotonic()
    for done, size in enumerate(reversed(sizes), start=1):
        record(size)
        log.info(
            f"{what} recorded",
            tokens=size,
            done=f"{done}/{len(sizes)}",
            seconds=round(time.monotonic() - began, 1),
            gib=round(capture.num_bytes() / GIB, 3),
        )


class _Memory:
    """Bytes of the device, for whoever knows the interface."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
