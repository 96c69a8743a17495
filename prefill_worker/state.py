"""What becomes of each prefill attempt: events in, actions out. No I/O, no clock, no torch.

              Arrived          Started            Sampled           last transfer ended
    (unknown) ------> WAITING --------> RUNNING ----------> PUSHING -------------------> (over)
                         |                |  \\-- Aborted, failed --\\    |
                         | Aborted        |                         v    v Aborted, failed
                         v                \\------------------------> STOPPING --> (over)
                       (over)              nothing in flight: over at once

An attempt is over only when none of its transfers is in flight; its pages are released then,
not earlier. What waits in line for its peer is withdrawn when it stops. `Stopped` and `Failed`
leave when it is over, so that both mean: no write of this attempt is in flight or ever will be.
"""

from collections.abc import Iterator
from weakref import WeakValueDictionary

from engine.link.messages import Failed, Prefilled, Stopped, SubmitPrefill
from prefill_worker.attempt import Attempt, AttemptPhase, Peer
from prefill_worker.events import (
    AbortAsked,
    Action,
    Advanced,
    Arrived,
    Die,
    Event,
    PushBegan,
    PushEnded,
    PushFailed,
    PushWithdrawn,
    Refused,
    Release,
    ReleasePeer,
    Sampled,
    Send,
    Started,
    Ticked,
    Withdraw,
)

# A peer to which transfers are under way, and none lands for so long, is given up with all of them.
# The target's owner keeps its pages in quarantine for longer than both bounds together.
TRANSFER_STALL_SECONDS = 4.0
RELEASE_STALL_SECONDS = 2.0
# Transfers move only while the loop looks after them: a long step counts as one short look.
LONGEST_LOOK_SECONDS = 0.5


class PrefillState:
    """All attempts of one rank, in order of arrival."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._attempts: dict[str, Attempt] = {}
        self._peers: WeakValueDictionary[bytes, Peer] = WeakValueDictionary()
        self._num_waiting = 0
        self._ticked_at: float | None = None
        self._looked_seconds = 0.0  # in which the loop looked after transfers, since the start

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts.values())

    def by_priority(self) -> list[Attempt]:
        """Higher priorities first, equal ones in order of arrival."""
        return sorted(self._attempts.values(), key=lambda attempt: -attempt.submit.priority)

    def __getitem__(self, attempt_id: str) -> Attempt:
        return self._attempts[attempt_id]

    def __contains__(self, attempt_id: object) -> bool:
        return attempt_id in self._attempts

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def step(self, event: Event, now: float) -> list[Action]:
        """What to do about `event`, in this order."""
        match event:
            case Arrived(submit):
                return self._arrive(submit, now)
            case AbortAsked(attempt_id):
                return self._abort(attempt_id)
            case Refused(attempt_id, code, message):
                return self._fail(self._attempts[attempt_id], code, message)
            case Started(attempt_id, num_cached_tokens):
                self._start(self._attempts[attempt_id], num_cached_tokens, now)
            case PushBegan(attempt_id, num_bytes):
                self._begin_push(self._attempts[attempt_id], num_bytes, now)
            case PushFailed(attempt_id, message):
                return self._fail(self._attempts[attempt_id], "UNAVAILABLE", message)
            case PushEnded(attempt_id, error):
                return self._end_push(self._attempts[attempt_id], error)
            case PushWithdrawn(attempt_id):
                return self._withdraw_push(self._attempts[attempt_id])
            case Advanced(attempt_id, num_done_tokens, step_seconds):
                self._advance(attempt_id, num_done_tokens, step_seconds)
            case Sampled():
                return self._answer(event, now)
            case Ticked():
                return self._tick(now)
        return []

    def _arrive(self, submit: SubmitPrefill, now: float) -> list[Action]:
        if submit.attempt_id in self._attempts:
            message = f"attempt {submit.attempt_id} is being worked on already"
            return [Send(failed(submit, "INVALID_ARGUMENT", message))]
        if self._num_waiting >= self._max_waiting:
            message = f"{self._num_waiting} requests are waiting for prefill already"
            return [Send(failed(submit, "RESOURCE_EXHAUSTED", message))]
        self._num_waiting += 1
        peer = self._peers.setdefault(submit.target.agent, Peer())
        self._attempts[submit.attempt_id] = Attempt(submit=submit, peer=peer, arrived_at=now)
        return []

    def _abort(self, attempt_id: str) -> list[Action]:
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return [Send(Stopped(attempt_id=attempt_id, was_known=False))]
        attempt.stop_asked = True
        return self._stop(attempt)

    def _start(self, attempt: Attempt, num_cached_tokens: int, now: float) -> None:
        assert attempt.phase is AttemptPhase.WAITING
        self._num_waiting -= 1
        attempt.phase = AttemptPhase.RUNNING
        attempt.started_at = now
        attempt.num_cached_tokens = attempt.num_done_tokens = num_cached_tokens

    def _begin_push(self, attempt: Attempt, num_bytes: int, now: float) -> None:
        attempt.num_in_flight += 1
        attempt.kv_bytes += num_bytes
        attempt.still_since = self._looked_seconds
        if attempt.first_push_at is None:
            attempt.first_push_at = now

    def _end_push(self, attempt: Attempt, error: str) -> list[Action]:
        attempt.num_in_flight -= 1
        attempt.still_since = self._looked_seconds
        assert attempt.num_in_flight >= 0
        if error:
            return self._fail(attempt, "UNAVAILABLE", f"KV transfer failed: {error}")
        attempt.peer.moved_at = self._looked_seconds
        if attempt.num_in_flight or attempt.phase is AttemptPhase.RUNNING:
            return []
        return self._end(attempt)

    def _withdraw_push(self, attempt: Attempt) -> list[Action]:
        assert attempt.phase is AttemptPhase.STOPPING, attempt.phase
        attempt.num_in_flight -= 1
        return [] if attempt.num_in_flight else self._end(attempt)

    def _advance(self, attempt_id: str, num_done_tokens: int, step_seconds: float) -> None:
        """The attempt may have failed during the step."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and attempt.phase is AttemptPhase.RUNNING:
            attempt.num_done_tokens = num_done_tokens
            attempt.compute_seconds += step_seconds

    def _answer(self, sampled: Sampled, now: float) -> list[Action]:
        """As `_advance`: a failed attempt gives no token."""
        attempt = self._attempts.get(sampled.attempt_id)
        if attempt is None or attempt.phase is not AttemptPhase.RUNNING:
            return []
        assert not attempt.num_left_tokens
        attempt.phase = AttemptPhase.PUSHING
        first_push_at = now if attempt.first_push_at is None else attempt.first_push_at
        prefilled = Prefilled(
            request_id=attempt.submit.request_id,
            attempt_id=sampled.attempt_id,
            token=sampled.token,
            num_cached_tokens=attempt.num_cached_tokens,
            num_computed_tokens=attempt.submit.num_tokens - attempt.num_cached_tokens,
            kv_bytes=attempt.kv_bytes,
            queue_seconds=attempt.started_at - attempt.arrived_at,
            compute_seconds=attempt.compute_seconds,
            transfer_seconds=now - first_push_at,
            prompt_logprobs=sampled.prompt_logprobs,
        )
        answer: list[Action] = [Send(prefilled)]
        return answer if attempt.num_in_flight else answer + self._end(attempt)

    def _fail(self, attempt: Attempt, code: str, message: str) -> list[Action]:
        if attempt.failure is None:
            attempt.failure = failed(attempt.submit, code, message)
        return self._stop(attempt)

    def _stop(self, attempt: Attempt) -> list[Action]:
        if attempt.phase is AttemptPhase.WAITING:
            self._num_waiting -= 1
        attempt.phase = AttemptPhase.STOPPING
        if not attempt.num_in_flight:
            return self._end(attempt)
        return [Withdraw(attempt.submit.attempt_id)]

    def _end(self, attempt: Attempt) -> list[Action]:
        attempt_id = attempt.submit.attempt_id
        del self._attempts[attempt_id]
        actions: list[Action] = [Release(attempt_id)]
        if attempt.failure is not None:
            actions.append(Send(attempt.failure))
        if attempt.stop_asked:
            actions.append(Send(Stopped(attempt_id=attempt_id, was_known=True)))
        return actions

    def _tick(self, now: float) -> list[Action]:
        since = now if self._ticked_at is None else self._ticked_at
        self._ticked_at = now
        self._looked_seconds += min(now - since, LONGEST_LOOK_SECONDS)
        actions: list[Action] = []
        for attempt in self._attempts.values():
            if not attempt.num_in_flight:
                continue
            if attempt.peer_released:
                if self._looked_seconds - attempt.still_since > RELEASE_STALL_SECONDS:
                    actions.append(Die(f"transfers of {attempt.submit.attempt_id} do not end"))
                continue
            moved_at = max(attempt.still_since, attempt.peer.moved_at)
            if self._looked_seconds - moved_at > TRANSFER_STALL_SECONDS:
                attempt.peer_released = True
                attempt.still_since = self._looked_seconds
                actions.append(ReleasePeer(attempt.submit.attempt_id))
        return actions


def failed(submit: SubmitPrefill, code: str, message: str) -> Failed:
    """The end of an attempt; `code` is a gRPC status name."""
    return Failed(
        request_id=submit.request_id, attempt_id=submit.attempt_id, code=code, message=message
    )
