"""A forward pass that has been begun: its tokens are there later."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.drawn import Drawn
from engine.messages import TokenOut


class PendingStep:
    """`is_sampled` says of each piece whether a token was wanted. One thread waits for it; who
    computes calls `settle` or `fail` once."""

    def __init__(self, is_sampled: Sequence[bool]) -> None:
        self._is_sampled = tuple(is_sampled)
        self._is_settled = threading.Event()
        self._drawn: Drawn | None = None
        self._error: BaseException | None = None

    @property
    def token_ids(self) -> torch.Tensor:
        """[S] int64 on the device, of the sampled pieces in order; for work enqueued behind this
        step, which need not be over."""
        assert self._drawn is not None, "work overtakes the step that it depends on"
        return self._drawn.token_ids

    def wait(self) -> None:
        """Until it is computed. Raises what computing it has raised."""
        self._drawn_there().wait()

    def result(self) -> list[TokenOut | None]:
        """One token a piece, None where none was wanted; waits, and raises as `wait` does."""
        tokens = iter(self._drawn_there().tokens())
        return [next(tokens) if wanted else None for wanted in self._is_sampled]

    def settle(self, drawn: Drawn) -> None:
        """All of it is enqueued, or computed."""
        self._drawn = drawn
        self._is_settled.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._is_settled.set()

    def _drawn_there(self) -> Drawn:
        self._is_settled.wait()
        if self._error is not None:
            raise self._error
        assert self._drawn is not None
        return self._drawn


@dataclass(frozen=True, slots=True)
class PendingToken:
    """The token that `step` samples for the `row`-th of its sampled pieces."""

    step: PendingStep
    row: int
