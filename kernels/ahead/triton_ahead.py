"""Triton's kernels, compiled ahead by several threads.

Triton compiles a kernel when it is first launched: a second each, one after the other. So passes
are run without computing, where all that would be written is zero, and threads compile what would
be launched, most of the time without Python's lock.

    with compiled_ahead(device, num_threads=16, launched=("kernels.moe.gate_triton",)) as compilers:
        ...passes...
        compilers.begin()
        ...what can be done meanwhile...
    # after it, all that the passes asked for is compiled and loaded

    with deferred_launches(on_kernel):     # the same by this thread, one after the other
        ...
"""

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

# Function, what Triton makes of it or will, and grid of a launch.
OnKernel = Callable[[JITFunction[Any], object, object], None]

_EMPTY = {
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}


class _Zeros(TorchDispatchMode):  # type: ignore[misc]
    """Memory that is asked for without values holds zeros."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func.overloadpacket in _EMPTY else out


@contextmanager
def deferred_launches(
    on_kernel: OnKernel,
    *,
    launched: Collection[str] = (),
    launching: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[None]:
    """Launches compile and end there, but for those of the modules `launched`: these are launched
    as ever, in a context `launching`."""
    run = JITFunction.run

    def compile_only(
        self: JITFunction[Any], *args: object, grid: object, warmup: bool, **options: object
    ) -> object:
        if self.fn.__module__ in launched:
            with launching():
                return run(self, *args, grid=grid, warmup=warmup, **options)
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        on_kernel(self, kernel, grid)
        return kernel

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


@contextmanager
def compiled_ahead(
    device: torch.device, *, num_threads: int, launched: Collection[str] = ()
) -> Iterator["Compilers"]:
    """What cannot be compiled fails whoever launches it."""
    with (
        Compilers(device, num_threads) as compilers,
        AsyncCompileMode(compilers, ignore_errors=True),
        compilers.begun_at_last(),
        deferred_launches(compilers.note, launched=launched, launching=compilers.by_this_thread),
        _Zeros(),
    ):
        yield compilers


class Compilers(ThreadPoolExecutor):
    """They wait for `begin`: who asks would have to share Python's lock with them. What they
    compile is also loaded, where there is a GPU: Triton has a C compiler build the way to launch a
    kernel only then. `names` are of the kernels that were asked for."""

    def __init__(self, device: torch.device, num_threads: int) -> None:
        super().__init__(num_threads, "triton-ahead", self._set_out)
        self.names: set[str] = set()
        self._device = device
        self._begun = threading.Event()
        self._is_urgent = False

    def begin(self) -> None:
        self._begun.set()

    @contextmanager
    def begun_at_last(self) -> Iterator[None]:
        """Whatever happens: what was submitted is waited for."""
        try:
            yield
        finally:
            self.begin()

    def note(self, function: JITFunction[Any], *_: object) -> None:
        self.names.add(function.fn.__name__)

    @contextmanager
    def by_this_thread(self) -> Iterator[None]:
        """What is submitted is compiled at once."""
        self._is_urgent = True
        try:
            yield
        finally:
            self._is_urgent = False

    def submit(self, fn: Callable[..., Any], /, *arguments: object, **named: object) -> Future[Any]:
        if not self._is_urgent:
            return super().submit(self._compile, fn, *arguments, **named)
        done: Future[Any] = Future()
        done.set_result(fn(*arguments, **named))
        return done

    def _set_out(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._begun.wait()

    def _compile(
        self, compile_kernel: Callable[..., Any], *arguments: object, **named: object
    ) -> object:
        kernel = compile_kernel(*arguments, **named)
        if self._device.type == "cuda":
            _ = kernel.run  # loads it
        return kernel
