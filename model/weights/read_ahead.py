"""Reads tensors before they are asked for, in about the order in which they will be.

ahead = ReadAhead(start, run_of)
ahead.plan(names)
for name in names:
    ahead.take(name)      # begins with what comes next, then waits for this one

Every read costs some time beside that of its bytes: tensors of experts that are wanted at about the
same time and lie beside each other in a file are read together, and are parts of one memory.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from model.weights.file_reader import Reading

# What may be on its way, or read and not asked for yet, beside what is read together.
WINDOW_BYTES = 512 << 20
# Of planned tensors, among which neighbours are looked for.
NEIGHBOURHOOD_BYTES = 192 << 20
# Of what is read together: an expert of DeepSeek-V3 in int4. Who asks waits for all of it.
RUN_BYTES = 24 << 20
# Of others between two tensors, which are read too.
GAP_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a file, counted from the end of its header. What `may_join` others takes no harm
    when memory that it is part of stays; it begins at a multiple of `alignment` there."""

    file: Path
    begin: int
    end: int
    on_host: bool = False
    may_join: bool = False
    alignment: int = 1

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def joined(self, after: "Run") -> "Run | None":
        """With one that begins after it; None where they are not read together."""
        is_near = self.file == after.file and after.begin <= self.end + GAP_BYTES
        is_small = after.end - self.begin <= RUN_BYTES
        fits = (
            self.may_join and after.may_join and (after.begin - self.begin) % after.alignment == 0
        )
        return (
            replace(self, end=max(self.end, after.end)) if is_near and is_small and fits else None
        )


@dataclass(slots=True)
class _Begun:
    reading: Reading
    num_left: int  # tensors that are not taken


class ReadAhead:
    """`start(run)` begins to read; `run_of(name)` are a tensor's bytes alone. What was not planned,
    or is asked for out of turn, is read when it is asked for."""

    def __init__(
        self,
        start: Callable[[Run], Reading],
        run_of: Callable[[str], Run],
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._start = start
        self._run_of = run_of
        self._window_bytes = window_bytes
        self._planned: OrderedDict[Run, int] = OrderedDict()  # and how many tensors it has
        self._shared: dict[str, Run] = {}  # of tensors that are planned and not taken
        self._begun: dict[Run, _Begun] = {}
        self._begun_bytes = 0

    def plan(self, names: Iterable[str]) -> None:
        """In this order; each is to be taken once."""
        self._planned.clear()
        self._shared.clear()
        for near in self._neighbourhoods(names):
            runs = self._together(near)
            self._shared |= runs
            for name in near:
                self._planned[runs[name]] = self._planned.get(runs[name], 0) + 1

    def take(self, name: str) -> torch.Tensor:
        """[num_bytes] uint8, waited for. CheckpointError when the file cannot be read."""
        alone = self._run_of(name)
        run = self._shared.pop(name, alone)
        if run not in self._begun:
            self._begin(run, self._planned.pop(run, 1))
        while self._planned and self._begun_bytes < self._window_bytes:
            self._begin(*self._planned.popitem(last=False))
        begun = self._begun[run]
        begun.num_left -= 1
        if not begun.num_left:
            del self._begun[run]
            self._begun_bytes -= run.num_bytes
        data = begun.reading.result()
        return data[alone.begin - run.begin : alone.end - run.begin]

    def _begin(self, run: Run, num_tensors: int) -> None:
        self._begun[run] = _Begun(self._start(run), num_tensors)
        self._begun_bytes += run.num_bytes

    def _neighbourhoods(self, names: Iterable[str]) -> Iterator[Sequence[str]]:
        near: list[str] = []
        num_bytes = 0
        for name in names:
            near.append(name)
            num_bytes += self._run_of(name).num_bytes
            if num_bytes >= NEIGHBOURHOOD_BYTES:
                yield near
                near, num_bytes = [], 0
        yield near

    def _together(self, names: Sequence[str]) -> dict[str, Run]:
        """What each is read with."""
        runs: dict[str, Run] = {}
        members: list[str] = []
        whole: Run | None = None
        for name, alone in sorted(
            ((name, self._run_of(name)) for name in names),
            key=lambda each: (each[1].file, each[1].begin),
        ):
            longer = whole.joined(alone) if whole else None
            if longer is None:
                members = []
            members.append(name)
            whole = longer or alone
            runs |= dict.fromkeys(members, whole)
        return runs
