"""All that may happen in a small world, one thing after the other, in every order.

Depth first: a state that is reached again is not gone on from. Worlds cannot be copied, since
coroutines cannot: another branch begins with a new world, which goes the same way up to there.
"""

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar


class World(Protocol):
    def choices(self) -> list[str]:
        """What may happen next; names say so, and begin with FAULT for what need not."""
        ...

    def do(self, choice: str) -> None:
        """Raises AssertionError, or whatever the code in it raises, when something is wrong."""
        ...

    def check(self) -> None:
        """What must be true at any time."""
        ...

    def fingerprint(self) -> Hashable: ...

    def check_over(self) -> None:
        """Nothing more has to happen: everything must have come to its end."""
        ...

    def close(self) -> None: ...


W = TypeVar("W", bound=World)
FAULT = "! "
# Of a way that is gone at random.
MOST_STEPS = 600
MOSTLY = 0.9  # without a fault


class ProtocolError(AssertionError):
    """`trace` is what happened, in order."""

    def __init__(self, trace: Sequence[str], cause: BaseException | str) -> None:
        self.trace = tuple(trace)
        super().__init__("\n".join([f"{cause!r}" if cause else "", *self.trace]))


@dataclass
class Explored:
    num_states: int = 0
    num_steps: int = 0  # those that lead to them, from the states before
    num_ends: int = 0  # states in which everything is over
    longest: int = 0
    is_whole: bool = True  # nothing was left out
    _after: dict[Hashable, list[Hashable]] = field(default_factory=dict)  # without faults
    _ends: set[Hashable] = field(default_factory=set)
    _traces: dict[Hashable, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        rest = "" if self.is_whole else ", not all"
        return (
            f"{self.num_states} states, {self.num_steps} steps, {self.num_ends} ends, "
            f"{self.longest} steps deep{rest}"
        )

    def stuck(self) -> tuple[str, ...] | None:
        """How to come to a state from which, without faults, no end is reached."""
        before: dict[Hashable, list[Hashable]] = {}
        for state, states in self._after.items():
            for after in states:
                before.setdefault(after, []).append(state)
        # What has not been gone on from may lead anywhere.
        open_ = [state for state in self._traces if state not in self._after]
        good, line = set(self._ends), [*self._ends, *open_]
        good.update(open_)
        while line:
            for state in before.get(line.pop(), ()):
                if state not in good:
                    good.add(state)
                    line.append(state)
        return next((trace for state, trace in self._traces.items() if state not in good), None)


def explore(make: Callable[[], World], most_states: int) -> Explored:
    """Raises ProtocolError for the first thing that is wrong."""
    explored = Explored()
    world, path = make(), ()
    start = world.fingerprint()
    explored._traces[start] = ()
    line = _next(explored, world, start, ())
    try:
        while line:
            if len(explored._traces) >= most_states:
                explored.is_whole = False
                break
            before, trace, choice = line.pop()
            if path != trace:
                world.close()
                world, path = replay(make, trace), trace
            path = (*trace, choice)
            _do(world, choice, path)
            state = world.fingerprint()
            explored.num_steps += 1
            explored.longest = max(explored.longest, len(path))
            if not choice.startswith(FAULT):
                explored._after[before].append(state)
            if state not in explored._traces:
                explored._traces[state] = path
                line += _next(explored, world, state, path)
    finally:
        world.close()
    explored.num_states = len(explored._traces)
    explored.num_ends = len(explored._ends)
    if explored.is_whole and (trace := explored.stuck()) is not None:
        raise ProtocolError(trace, "from here no end is reached")
    return explored


def _next(
    explored: Explored, world: World, state: Hashable, path: tuple[str, ...]
) -> list[tuple[Hashable, tuple[str, ...], str]]:
    explored._after[state] = []
    choices = world.choices()
    if _is_over(world, choices, path):
        explored._ends.add(state)
    return [(state, path, choice) for choice in reversed(choices)]


def replay(make: Callable[[], W], trace: Sequence[str]) -> W:
    """A world in which this has happened."""
    world = make()
    for choice in trace:
        world.do(choice)
    return world


def _do(world: World, choice: str, path: Sequence[str]) -> None:
    try:
        world.do(choice)
        world.check()
    except Exception as error:
        raise ProtocolError(path, error) from error


def _is_over(world: World, choices: Sequence[str], path: Sequence[str]) -> bool:
    if not all(choice.startswith(FAULT) for choice in choices):
        return False
    try:
        world.check_over()
    except AssertionError as error:
        raise ProtocolError(path, error) from error
    return True


def shortened(make: Callable[[], World], error: ProtocolError) -> ProtocolError:
    """One with a shorter trace, where leaving out parts of it does no good either. Of one that
    has no end nothing is left out."""
    size = len(error.trace) // 2 if len(error.trace) <= MOST_STEPS else 0
    while size:
        begin = 0
        while begin < len(error.trace):
            shorter = _attempt(make, (*error.trace[:begin], *error.trace[begin + size :]))
            if shorter is None:
                begin += size
            else:
                error = shorter
        size //= 2
    return error


def _attempt(make: Callable[[], World], trace: Sequence[str]) -> ProtocolError | None:
    world = make()
    try:
        for index, choice in enumerate(trace):
            if choice not in world.choices():
                return None
            _do(world, choice, trace[: index + 1])
        _is_over(world, world.choices(), trace)
    except ProtocolError as error:
        return error
    finally:
        world.close()
    return None


def wander(make: Callable[[], World], seed: int) -> int:
    """One way through a world that is too large to be explored; how many steps it took. Raises as
    `explore`."""
    world, path, dice = make(), [], random.Random(seed)
    try:
        while not _is_over(world, choices := world.choices(), path):
            due = [choice for choice in choices if not choice.startswith(FAULT)]
            path.append(dice.choice(due if due and dice.random() < MOSTLY else choices))
            if len(path) > MOST_STEPS:
                raise ProtocolError(path, "no end comes")
            _do(world, path[-1], path)
    finally:
        world.close()
    return len(path)
