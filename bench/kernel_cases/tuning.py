"""What tuners share: candidates are compiled by all cores first, then measured one by one."""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from triton.runtime.errors import OutOfResources

from bench.kernel_cases.gpu_timing import Call, microseconds
from kernels.build.tuned import device_facts, read_table

Blocks = TypeVar("Blocks")


class Tuner(Generic[Blocks]):
    """Measures candidates of one kernel. `seconds_left` bounds the whole: what is not measured by
    then is left out, never the first candidate of a shape."""

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self._now = now
        self._end = now() + seconds

    @property
    def seconds_left(self) -> float:
        return self._end - self._now()

    def times(
        self, candidates: Iterable[Blocks], call_of: Callable[[Blocks], Call], calls: int = 3
    ) -> dict[Blocks, float]:
        """Microseconds of each candidate that the device can run; the first comes first."""
        found: dict[Blocks, float] = {}
        for number, blocks in enumerate(candidates):
            if number and self.seconds_left <= 0:
                break
            try:
                found[blocks] = microseconds(call_of(blocks), calls)
            except OutOfResources as error:
                sys.stdout.write(f"  {blocks}: {error}\n")
        return found


def precompile(compile_one: Callable[[Blocks], None], jobs: Sequence[Blocks]) -> None:
    """Fills Triton's cache of compiled kernels: `compile_one`, a function of a module, is called
    in processes of their own, which see no GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        context = multiprocessing.get_context("spawn")
        workers = max(1, min(len(jobs), os.cpu_count() or 1))
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            for _ in pool.map(compile_one, jobs):
                pass
    finally:
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def write_section(path: Path, name: str, shapes: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Puts the shapes into a section of this device's file, beside those that were there."""
    table = read_table(path)
    table["device"] = device_facts(torch.device("cuda"))
    table[name] = table.get(name, {}) | shapes
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
