"""Compiles Triton kernels for sm_90 on a machine without a GPU, as their launchers launch them.

    compiled(lambda: quantise(meta_tensor))     every kernel that the call would have launched
    python -m bench.compile_offline [NAME...]   what `kernel_cases.compile_cases` lists, as a table
    python -m bench.compile_offline --json      the same, a line of JSON a kernel

A launcher is given tensors of torch's `meta` device, which have shapes and no memory; a launch
compiles and ends there. Block sizes, warps and stages are therefore those of the real launch.
Triton's interpreter must be off (TRITON_INTERPRET).
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels.ahead.triton_ahead import deferred_launches

TARGET = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 * 1024  # of a block on sm_90
# A few registers more or less are a matter of the compiler's version.
MAX_STACK_BYTES = 128
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One kernel. `stack_bytes` a thread: what did not fit into its `registers`. `matrix` counts
    the warp group's matrix instructions in the machine code."""

    case: str
    kernel: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    num_stages: int
    matrix: int
    grid: tuple[int, ...]
    assembly: str = ""

    @property
    def fits(self) -> bool:
        return self.stack_bytes <= MAX_STACK_BYTES and self.shared_bytes <= MAX_SHARED_BYTES


_Seen = list[tuple[str, CompiledKernel, tuple[int, ...]]]  # name, kernel, grid


class _NoDriver:
    """What a launch asks of the driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


@contextmanager
def _offline(seen: _Seen) -> Iterator[None]:
    """Launches compile, and `seen` gets name, kernel and grid of each."""

    def see(function: JITFunction[Any], kernel: object, grid: object) -> None:
        # Triton may compile in the background.
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        assert isinstance(grid, tuple), grid
        seen.append((function.fn.__name__, kernel, grid))

    before = driver._active
    driver.set_active(_NoDriver())
    try:
        with deferred_launches(see):
            yield
    finally:
        driver.set_active(before)


def compile_into_cache(call: Callable[[], object]) -> None:
    """Every kernel that `call` launches, for who launches it later on a GPU."""
    with _offline([]):
        call()


def compiled(call: Callable[[], object], *, case: str = "") -> list[Compiled]:
    """Every kernel that `call` launches, each way of it once."""
    seen: _Seen = []
    with _offline(seen):
        call()
    once = {(name, kernel.hash): (name, kernel, grid) for name, kernel, grid in seen}
    return [_describe(case, *each) for each in once.values()]


def _describe(case: str, name: str, kernel: CompiledKernel, grid: tuple[int, ...]) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        assembly = _tool("cuobjdump", "--dump-sass", file.name)
    facts = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage)}
    return Compiled(
        case=case,
        kernel=name,
        registers=facts["REG"],
        stack_bytes=facts["STACK"] + facts["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        matrix=len(re.findall(r"\b[QH]GMMA", assembly)),
        grid=grid,
        assembly=assembly,
    )


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run(
        [str(_TOOLS / name), *arguments], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def _row(each: Compiled) -> str:
    return (
        f"{each.case:44} {each.kernel:20} {each.registers:4} regs {each.stack_bytes:4} stack"
        f" {each.shared_bytes:7} shared {each.num_warps:2} warps {each.num_stages:2} stages"
        f" {each.matrix:4} gmma  grid {'x'.join(map(str, each.grid))}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    from bench.kernel_cases.compile_cases import CASES

    parser = argparse.ArgumentParser(description="Compile the Triton kernels for sm_90.")
    parser.add_argument("names", nargs="*", help="cases that begin with one of these (all)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true", help="only name the cases")
    parser.add_argument("--sass", type=Path, help="write the machine code into this folder")
    options = parser.parse_args(arguments)
    fits = True
    for case, call in CASES.items():
        if options.names and not case.startswith(tuple(options.names)):
            continue
        if options.list:
            sys.stdout.write(f"{case}\n")
            continue
        for each in compiled(call, case=case):
            fits = fits and each.fits
            if options.sass:
                options.sass.mkdir(parents=True, exist_ok=True)
                name = f"{case.replace(' ', '_')}.{each.kernel}.sass"
                (options.sass / name).write_text(each.assembly, encoding="utf-8")
            facts = asdict(each) | {"fits": each.fits, "assembly": ""}
            sys.stdout.write(json.dumps(facts) + "\n" if options.json else _row(each))
            sys.stdout.flush()
    return 0 if fits else 1


if __name__ == "__main__":
    raise SystemExit(main())
