"""The loop of a rank, prefill or decode: steps that all ranks of an EP group take together.

turn      hears the front, brings the books up to date, plans
exchange  tells the other ranks what this one computes, and hears what they do
then, on all ranks alike: leave, or change experts, and compute, or wait until one has work
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sized
from typing import Generic, TypeVar

from core.clock import Clock, SystemClock
from engine.experts.rank_experts import RankExperts
from engine.link.messages import (
    Abort,
    ExpertOrder,
    Failed,
    Prefilled,
    PrefillStopped,
    RankMessage,
    RankStats,
    Shutdown,
    Submit,
    SubmitPrefill,
)
from engine.start.rank import RankContext

# Idle, the front is told of this rank's state this often.
IDLE_SECONDS = 1.0
# Shorter than this no socket can be polled.
SHORTEST_POLL_SECONDS = 0.001

Work = TypeVar("Work", bound=Sized)
RequestMessage = Submit | SubmitPrefill | Prefilled | Failed | Abort | PrefillStopped


class RankLoop(ABC, Generic[Work]):
    """`run` returns when the whole EP group leaves. What a turn has decided to compute is a
    `Work`, empty when there is nothing. `_outbox` leaves with the next report."""

    def __init__(self, context: RankContext, clock: Clock | None) -> None:
        self._clock = clock or SystemClock()
        self._link = context.link
        self._group = context.group
        self._runner = context.runner
        self._experts = RankExperts(context, self._clock)
        self._outbox: list[RankMessage] = []
        self._reported_at = self._clock.now()
        self._stop = False
        self._stop_told = False  # to the other ranks, in an exchange

    def run(self) -> None:
        """Steps until all fronts of the group have said Shutdown: the other nodes' requests need
        this rank's experts as long as there are any."""
        while self._step():
            pass
        self._land()
        self._report()
        self._close()

    # ---- of the role

    @abstractmethod
    def _turn(self) -> Work:
        """Takes in what has come and decides what is computed next."""

    @abstractmethod
    def _sizes(self, work: Work) -> tuple[int, int]:
        """What all ranks have to know of it: tokens (of a decode rank, requests) that go through
        the model, and rows that want logits (drafts a request that would pay)."""

    @abstractmethod
    def _compute(
        self, work: Work, began: float, tokens_per_rank: tuple[int, ...], others: tuple[int, ...]
    ) -> None:
        """One forward pass of the group; `work` may be empty. `tokens_per_rank` and `others` are
        what `_sizes` is on each rank."""

    @abstractmethod
    def _wait_seconds(self) -> float:
        """How long this rank may sleep for its own sake."""

    @abstractmethod
    def _has_news(self) -> bool:
        """Whether the front should hear more than what is in the outbox."""

    @abstractmethod
    def _take_statistics(self) -> RankStats:
        """As of now; what is told once begins anew."""

    def _await_inflight(self) -> None:
        """Returns when no pass is being computed."""

    def _land(self) -> bool:
        """Takes in the pass that is being computed; whether there was one."""
        return False

    def _rest(self) -> None:
        """There is nothing to do."""

    @abstractmethod
    def _close(self) -> None:
        """The last call."""

    # ---- of all

    def _step(self) -> bool:
        """One step of the whole group; False when it leaves."""
        work = self._turn()
        if self._outbox:
            self._report()  # what is decided does not wait for the forward pass
        began = self._clock.now()
        if self._group.steps_use_sockets:
            self._await_inflight()
        own = (*self._sizes(work), int(self._stop), *self._experts.facts())
        facts = self._group.exchange(own)
        self._stop_told = self._stop
        if all(stop for _, _, stop, *_ in facts):
            return False
        of_experts = [told[3:] for told in facts]
        if self._experts.has_work(of_experts):
            self._await_inflight()  # it reads the weights and the maps that may change
            self._outbox.extend(self._experts.at_boundary(of_experts))
        tokens_per_rank = tuple(told[0] for told in facts)
        if any(tokens_per_rank):
            self._compute(work, began, tokens_per_rank, tuple(told[1] for told in facts))
        elif not self._land():  # what comes of it is planned before any rank sleeps
            self._idle()
        self._report_news()
        return True

    def _drain(self) -> list[RequestMessage]:
        """What the front has said, but for what every loop obeys alike."""
        messages: list[RequestMessage] = []
        for message in self._link.drain():
            if isinstance(message, Shutdown):
                self._stop = True
            elif isinstance(message, ExpertOrder):
                self._experts.hear(message)
            else:
                messages.append(message)
        return messages

    def _idle(self) -> None:
        """Returns when this rank or a peer has work, or the group is to leave."""
        self._rest()
        while True:
            self._report_news()
            self._wait()
            if self._group.peer_woke():
                return
            if self._has_work():
                self._group.wake()
                return

    def _has_work(self) -> bool:
        """Whether a step would do something here; the step itself plans again."""
        work = self._turn()
        stop_is_news = self._stop and not self._stop_told
        return len(work) > 0 or stop_is_news or self._experts.has_news

    def _wait(self) -> None:
        seconds = min(self._wait_seconds(), self._experts.wait_seconds)
        if seconds < SHORTEST_POLL_SECONDS:
            time.sleep(seconds)
            seconds = 0.0
        self._group.idle_wait(self._link.socket, seconds)

    def _report_news(self) -> None:
        overdue = self._clock.now() - self._reported_at >= IDLE_SECONDS
        if self._outbox or overdue or self._has_news():
            self._report()

    def _report(self) -> None:
        """Sends what there is to say, and the statistics."""
        self._link.send(self._outbox, self._take_statistics())
        self._outbox.clear()
        self._reported_at = self._clock.now()
