"""Functions of CUDA C++ sources that launch kernels: built and loaded when first called."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.build import cuda_build

POINTER, NUMBER, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float
Parameter = type[ctypes.c_void_p | ctypes.c_int | ctypes.c_longlong | ctypes.c_float]


class CudaKernel:
    """`NAME_launch` of the source NAME.cu: a C function of `parameters` and, after them, a stream,
    that gives null, or why nothing was launched."""

    def __init__(self, source: Path, *parameters: Parameter) -> None:
        self._source = source
        self._parameters = parameters

    def is_built(self, otherwise: str) -> bool:
        """As `cuda_build.is_built`."""
        return cuda_build.is_built(self._source, otherwise)

    def launch(self, device: torch.device, *arguments: torch.Tensor | float | None) -> None:
        """On the current stream of `device`; tensors, or None, for pointers. Raises RuntimeError
        where the library cannot be built or the kernel not be launched."""
        given: list[tuple[Parameter, Any]] = list(zip(self._parameters, arguments, strict=True))
        values = [
            value.data_ptr() if kind is POINTER and value is not None else value
            for kind, value in given
        ]
        with torch.cuda.device(device):
            why = self._function(*values, torch.cuda.current_stream().cuda_stream)
        if why:
            numbers = ", ".join(str(value) for kind, value in given if kind is not POINTER)
            raise RuntimeError(f"{self._source.stem} ({numbers}): {why.decode()}")

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        # The interpreter's lock is kept: a launch takes microseconds.
        library = ctypes.PyDLL(str(cuda_build.build(self._source)))
        function = library[f"{self._source.stem}_launch"]
        function.argtypes = [*self._parameters, POINTER]
        function.restype = ctypes.c_char_p
        return function
