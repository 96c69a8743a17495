"""Moments in the work of a device, cheap to take: an event on a GPU, the time on a CPU."""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepMark:
    """`event` on a GPU, else `seconds`."""

    event: torch.cuda.Event | None = None
    seconds: float = 0.0

    @classmethod
    def take(cls, on_gpu: bool) -> "StepMark":
        """On a GPU the moment at which all work enqueued so far is done."""
        if not on_gpu:
            return cls(seconds=time.monotonic())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cls(event=event)

    def seconds_until(self, later: "StepMark") -> float:
        """Both have passed."""
        if self.event is None or later.event is None:
            return later.seconds - self.seconds
        return self.event.elapsed_time(later.event) / 1000
