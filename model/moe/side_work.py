"""What a layer computes beside its main line: on a GPU, on a stream of its own.

    side = SideWork(x.device)
    side.start(lambda: shared.forward(x))     reads what the current stream has computed so far
    ...                                       the main line
    y = side.join()                           for the current stream to read

Under capture the two lines become branches of the graph. What the work reads must live until it is
joined. On a CPU, and without a stream, the work is done at once.
"""

from collections.abc import Callable
from functools import cache

import torch


class SideWork:
    """One piece of work at a time."""

    def __init__(self, device: torch.device, *, has_stream: bool = True) -> None:
        self._stream = _stream(device) if has_stream and device.type == "cuda" else None
        self._result: torch.Tensor | None = None

    def start(self, work: Callable[[], torch.Tensor]) -> None:
        assert self._result is None, "the work before is not joined"
        if self._stream is None:
            self._result = work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._result = work()

    def join(self) -> torch.Tensor | None:
        """None when nothing was started."""
        if self._stream is not None and self._result is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        result, self._result = self._result, None
        return result


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One a device: work of one layer follows that of the layer before."""
    return torch.cuda.Stream(device)
