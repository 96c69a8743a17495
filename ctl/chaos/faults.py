"""Faults as text and as values, and a schedule of them that is a pure function of its seed.

A scenario has a line a fault, in order of time; what follows a # is not read:

    2.50 kill decode-0/1                            # seconds since the start
    4.00 stop router-1 for 3.20
    6.10 delay decode-0 prefill-1 by 0.25 for 4.00
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from ctl.base.flags import WORKER_ROLES, Role


class Kind(StrEnum):
    """What can happen. Each but a kill is over after a while."""

    KILL = "kill"  # of a process, or of a rank
    STOP = "stop"  # of the same: it does nothing, and its connections stay
    PARTITION = "partition"  # between two processes: nothing passes
    DELAY = "delay"  # between two processes: all that passes is late
    DESCRIPTORS = "descriptors"  # a process, or a rank, can open no file and no connection
    FULL_DISK = "full-disk"  # the same can write to no file
    FULL_POOL = "full-pool"  # more requests than there are KV pages for
    SLOW_READER = "slow-reader"  # clients that do not read their streams
    CORRUPT_FILE = "corrupt-file"  # the cluster's token cannot be read


# Seconds, least and most.
_DURATIONS = dict.fromkeys(Kind, (0.5, 5.0)) | {Kind.KILL: (0.0, 0.0)}
_DELAYS = (0.02, 0.5)
_NUM_TARGETS = {Kind.PARTITION: 2, Kind.DELAY: 2} | dict.fromkeys(
    (Kind.FULL_POOL, Kind.SLOW_READER, Kind.CORRUPT_FILE), 0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`delay_seconds` is that of a delay alone."""

    at_seconds: float
    kind: Kind
    targets: tuple[str, ...] = ()
    seconds: float = 0.0
    delay_seconds: float = 0.0

    def __str__(self) -> str:
        words = [f"{self.at_seconds:.2f}", self.kind, *self.targets]
        words += [f"by {self.delay_seconds:.2f}"] if self.delay_seconds else []
        words += [f"for {self.seconds:.2f}"] if self.seconds else []
        return " ".join(words)

    @classmethod
    def parse(cls, line: str) -> "Fault":
        """Raises ValueError, with the line, for one that is no fault."""
        given = {}
        try:
            at, kind, *words = line.split()
            while len(words) >= 2 and words[-2] in ("by", "for"):
                *words, name, value = words
                given[name] = value
            fault = cls(
                at_seconds=float(at),
                kind=Kind(kind),
                targets=tuple(words),
                seconds=float(given.get("for", 0)),
                delay_seconds=float(given.get("by", 0)),
            )
        except ValueError as error:
            raise ValueError(f"{line!r} is no fault: {error}") from error
        wanted = _NUM_TARGETS.get(fault.kind, 1)
        if len(set(words)) != len(words) or len(words) != wanted:
            raise ValueError(f"{line!r} is no fault: {kind} takes {wanted} different processes")
        if ("by" in given) != (fault.kind is Kind.DELAY):
            raise ValueError(f"{line!r} is no fault: delays, and they alone, are `by` seconds")
        if ("for" in given) == (fault.kind is Kind.KILL):
            raise ValueError(f"{line!r} is no fault: all but kills are `for` seconds")
        if not all(0 <= each < 1e6 for each in (float(at), fault.seconds, fault.delay_seconds)):
            raise ValueError(f"{line!r} is no fault: seconds are from 0 to a million")
        return fault


def read_scenario(text: str) -> list[Fault]:
    """In order of time. Raises ValueError for a line that is no fault."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return sorted(map(Fault.parse, filter(None, lines)), key=lambda fault: fault.at_seconds)


def write_scenario(faults: Iterable[Fault], comment: str) -> str:
    return "".join(f"{line}\n" for line in (f"# {comment}", *faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a schedule is drawn for: names and roles of the processes, ranks as decode-0/1 among
    them."""

    roles: tuple[tuple[str, Role], ...]
    has_proxies: bool
    makes_token: bool

    def targets(self, kind: Kind) -> list[tuple[str, ...]]:
        """Of what is drawn: only processes die that another one can stand in for, and no
        gateway, whose streams die with it."""
        match kind:
            case Kind.KILL:
                fronts = [role for name, role in self.roles if "/" not in name]
                spared = {role for role in fronts if fronts.count(role) > 1} - {"gateway"}
                return [(name,) for name, role in self.roles if role in spared]
            case Kind.STOP | Kind.DESCRIPTORS | Kind.FULL_DISK:
                return [(name,) for name, _ in self.roles]
            case Kind.PARTITION | Kind.DELAY:
                return [*self._links()] if self.has_proxies else []
            case Kind.CORRUPT_FILE:
                return [()] if self.makes_token else []
            case Kind.FULL_POOL | Kind.SLOW_READER:
                return [()]

    def _links(self) -> Iterator[tuple[str, str]]:
        """Pairs of processes that call each other."""
        talking: list[set[Role]] = [{"gateway", "router"}, {"gateway", "decode"}]
        talking += [{"router", role} for role in WORKER_ROLES]
        talking.append({"prefill", "decode"})
        fronts = [(name, role) for name, role in self.roles if "/" not in name]
        for (one, role), (other, other_role) in combinations(fronts, 2):
            if {role, other_role} in talking:
                yield one, other


def make_schedule(
    seed: int, layout: Layout, *, count: int, rate: float, kinds: Sequence[Kind] = tuple(Kind)
) -> list[Fault]:
    """`count` faults, `rate` a second on average, of those kinds that the layout allows. Raises
    ValueError when it allows none."""
    rng = random.Random(f"epserve-chaos-{seed}")
    targets = {kind: found for kind in kinds if (found := layout.targets(kind))}
    if not targets:
        raise ValueError(f"nothing here can be hit by {', '.join(kinds)}")
    at = 0.0
    faults = []
    for _ in range(count):
        at += rng.expovariate(rate)
        kind = rng.choice([*targets])
        faults.append(
            Fault(
                at_seconds=round(at, 2),
                kind=kind,
                targets=rng.choice(targets[kind]),
                seconds=round(rng.uniform(*_DURATIONS[kind]), 2),
                delay_seconds=round(rng.uniform(*_DELAYS), 2) if kind is Kind.DELAY else 0.0,
            )
        )
    return faults
