"""The last assignments and why their pairs were chosen, for `ctl explain`.

Recording is on the path of every request: it keeps little, and leaves the rest for when somebody
asks.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from core.request_ids import choice_of, is_part_of
from proto.router_pb2 import AssignmentRecord, Candidate, ScorePart
from proto.worker_pb2 import ROLE_PREFILL
from router.scheduling.choose import Considered, Pair, Weights
from router.scheduling.demand import Demand
from router.scheduling.scorers import DECODE_SCORERS, PREFILL_SCORERS, Scored
from router.workers.worker import Worker

NUM_KEPT = 4096
# Of one assignment: the best ones, and those first that were left out.
MAX_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class _Record:
    at: float
    leg_id: str
    traced_id: str
    num_prompt_tokens: int
    outcome: str
    queue_seconds: float
    pair: Pair | None
    rejected: tuple[tuple[Worker, str], ...]
    workers: tuple[Worker, ...]
    scores: "array[float]"  # of each of `workers`: one a scorer of its role, then the total


class AssignmentRecords:
    """`wall` tells unix seconds."""

    def __init__(
        self, weights: Weights, *, num_kept: int = NUM_KEPT, wall: Callable[[], float] = time.time
    ) -> None:
        self._weights = weights
        self._records: deque[_Record] = deque(maxlen=num_kept)
        self._wall = wall

    def add(
        self,
        demand: Demand,
        outcome: str,
        queue_seconds: float,
        pair: Pair | None,
        considered: Considered,
    ) -> None:
        """One Assign call is over; `outcome` is ok or a gRPC status name."""
        scored = _best(considered.scored, pair)
        scores = array("d")
        for one in scored:
            scores.extend(one.scores)
            scores.append(one.total)
        record = _Record(
            self._wall(),
            demand.request_id,
            demand.traced_id,
            demand.num_prompt_tokens,
            outcome,
            queue_seconds,
            pair,
            tuple(considered.rejected[:MAX_CANDIDATES]),
            tuple([one.candidate.worker for one in scored]),
            scores,
        )
        self._records.append(record)

    def find(self, request_id: str) -> list[AssignmentRecord]:
        """Those of a request, a choice or a call, or all under a client's `x-request-id`; in
        order of time."""
        return [
            self._message(record)
            for record in self._records
            if record.traced_id == request_id
            or is_part_of(record.leg_id, request_id)
            or record.leg_id == choice_of(request_id)
        ]

    def _message(self, record: _Record) -> AssignmentRecord:
        pair = record.pair
        chosen = () if pair is None else (pair.prefill, pair.decode)
        values = iter(record.scores)
        candidates = [self._scored(worker, values, chosen) for worker in record.workers]
        candidates.sort(key=lambda one: (one.role, not one.chosen, -one.total))
        candidates += [
            Candidate(worker=worker.reference(), role=worker.role, rejected_by=name)
            for worker, name in record.rejected
        ]
        return AssignmentRecord(
            leg_id=record.leg_id,
            at=record.at,
            queue_seconds=record.queue_seconds,
            num_prompt_tokens=record.num_prompt_tokens,
            num_matched_pages=0 if pair is None else pair.num_matched_pages,
            outcome=record.outcome,
            candidates=candidates,
        )

    def _scored(
        self, worker: Worker, values: Iterator[float], chosen: Sequence[Worker]
    ) -> Candidate:
        scorers = PREFILL_SCORERS if worker.role == ROLE_PREFILL else DECODE_SCORERS
        weights = self._weights[worker.role_name]
        parts = [
            ScorePart(scorer=name, score=next(values), weight=weights[name]) for name in scorers
        ]
        return Candidate(
            worker=worker.reference(),
            role=worker.role,
            chosen=any(worker is one for one in chosen),
            parts=parts,
            total=next(values),
        )


def _best(scored: list[Scored], pair: Pair | None) -> list[Scored]:
    """The chosen ones and the best others, so many that thousands of records fit."""
    if len(scored) <= MAX_CANDIDATES:
        return scored
    chosen = () if pair is None else (pair.prefill, pair.decode)
    return sorted(scored, key=lambda one: (one.candidate.worker not in chosen, -one.total))[
        :MAX_CANDIDATES
    ]
