"""What the benchmark of kernels measures: a call, what it must move and compute, and a peer."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from types import ModuleType
from typing import TypeAlias

import torch

from bench.kernel_cases.gpu_timing import Call
from bench.kernel_cases.w4a8_floor import FP8_FLOPS

HIDDEN, HEADS, LATENT, ROPE, NOPE, EXPERTS, CHOICES = 7168, 128, 512, 64, 128, 256, 8
LOCAL, WIDTH, VOCABULARY = 32, 2048, 129_280  # experts of a rank, their inner width
BF16, FP8 = 2, 1  # bytes
GROUP_SCALE = 4 / 128  # bytes of a value, where 128 share a scale
BF16_FLOPS = FP8_FLOPS / 2

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`num_bytes` that the operation must move and `num_flops` that it must compute at least, the
    latter at `flops_per_second`. `library` makes a peer's call for the same of its package."""

    bench: str
    name: str
    call: Call
    num_bytes: float
    num_flops: float = 0.0
    flops_per_second: float = BF16_FLOPS
    package: str = "deep_gemm"
    library: Callable[[ModuleType], Call] | None = None

    def floor(self, bytes_per_second: float) -> float:
        """Microseconds that no implementation can do without."""
        seconds = max(self.num_bytes / bytes_per_second, self.num_flops / self.flops_per_second)
        return 1e6 * seconds


def function_of(name: str, *operands: object) -> Callable[[ModuleType], Call]:
    """What a case has as `library`: a function of the package with these operands."""
    return lambda package: partial(getattr(package, name), *operands)


def in_turn(calls: Iterable[Call]) -> Call:
    """Each time the next of them, so that what they read is too much for the caches together."""
    turns = cycle(calls)
    return lambda: next(turns)()


def installed(package: str) -> ModuleType | None:
    """A library to compare with, if it is there."""
    try:
        return importlib.import_module(package)
    except ImportError:
        return None


class Tensors:
    """Random operands on a device; "meta" has shapes only."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device

    def rows(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def random(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device)

    def fp8(self, *shape: int) -> Tensor:
        """A wide range of values, made in parts: float32 ones would need four times the room."""
        out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        if self.device == "meta":
            return out
        for part in out.view(-1, shape[-1]).split(8192):
            part.copy_(torch.randn(part.shape, device=self.device).mul_(60).clamp_(-400, 400))
        return out

    def full(self, shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def integers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def permutation(self, num: int) -> Tensor:
        return torch.randperm(num, device=self.device)
