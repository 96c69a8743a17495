"""A forward pass that has been begun: its tokens are there later."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.link.messages import TokenOut
from engine.sampling.sampled_batch import SampledBatch
from engine.step.step_mark import StepMark

Perform = Callable[[Callable[[], None]], None]


class PendingStep:
    """`is_sampled` says of each piece whether a token was wanted. `perform` does a job at once, or
    has it done after all those that it was given before. One thread uses a step."""

    def __init__(self, is_sampled: Sequence[bool], perform: Perform, on_gpu: bool = False) -> None:
        self._is_sampled = tuple(is_sampled)
        self._perform = perform
        self._on_gpu = on_gpu
        self._began = self._ended = StepMark()
        self._choose: Callable[[torch.Tensor], SampledBatch] | None = None
        self._is_settled = threading.Event()
        self._logits: torch.Tensor | None = None
        self._sampled: SampledBatch | None = None
        self._error: BaseException | None = None

    def begin(
        self, compute: Callable[[], torch.Tensor], choose: Callable[[torch.Tensor], SampledBatch]
    ) -> None:
        """Computes the logits; `sample` makes `choose` have them."""
        self._choose = choose

        def job() -> None:
            self._began = StepMark.take(self._on_gpu)
            self._logits = compute()

        self._perform(lambda: self._guarded(job))

    def sample(self) -> None:
        """Once all that is to be known of the tokens before its own is known; before the
        next step's begin. Does nothing when it has sampled already."""
        choose, self._choose = self._choose, None
        if choose is None:
            return

        def job() -> None:
            assert self._logits is not None
            self._sampled = choose(self._logits)
            self._logits = None
            self._ended = StepMark.take(self._on_gpu)
            self._is_settled.set()

        self._perform(lambda: self._guarded(job))

    @property
    def token_ids(self) -> torch.Tensor:
        """[S] int64 on the device, of the sampled pieces in order; for work enqueued after this
        step, which need not be over."""
        assert self._sampled is not None, "work overtakes the step that it depends on"
        return self._sampled.token_ids

    @property
    def is_over(self) -> bool:
        """Whether `result` does not wait."""
        return self._is_settled.is_set() and (self._sampled is None or self._sampled.is_here)

    def wait(self) -> None:
        """Until it is computed. Raises what computing it has raised."""
        self._drawn_there().wait()

    def result(self) -> list[TokenOut | None]:
        """One token a piece, None where none was wanted; waits, and raises as `wait` does."""
        tokens = iter(self._drawn_there().tokens())
        return [next(tokens) if wanted else None for wanted in self._is_sampled]

    def drafts(self) -> list[list[int]] | None:
        """Of what may follow each piece; None where none are made. Waits as `result`."""
        sampled = self._drawn_there()
        sampled.wait()
        return None if sampled.host_drafts is None else sampled.host_drafts.tolist()

    def seconds_behind(self, before: "PendingStep") -> float:
        """How long its device had nothing to do from the end of another one to its begin. Both are
        over."""
        return max(0.0, before._ended.seconds_until(self._began))

    def _drawn_there(self) -> SampledBatch:
        assert self._choose is None, "never sampled"
        self._is_settled.wait()
        if self._error is not None:
            raise self._error
        assert self._sampled is not None
        return self._sampled

    def _guarded(self, job: Callable[[], None]) -> None:
        if self._error is not None:
            return
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised to whoever waits
            self._error = error
            self._is_settled.set()


@dataclass(frozen=True, slots=True)
class PendingToken:
    """The token that `step` samples for the `row`-th of its sampled pieces."""

    step: PendingStep
    row: int
