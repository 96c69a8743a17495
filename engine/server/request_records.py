"""What a worker did for each of the last requests, for `ctl explain`.

    leg = records.begin(LegRecord(leg_id=..., ...))     # accepted
    leg.queue_seconds = ...                             # as things become known
    records.end(leg, "stop", total_seconds)             # no one listens any more

A leg is one call for one choice of a request.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import chain

from core.log import REQUEST_ID
from core.request_ids import is_part_of
from engine.link.messages import Prefilled, Produced
from proto.router_pb2 import WorkerRef
from proto.worker_pb2 import ProcessIdentity, RequestLeg, WorkerRefText

NUM_KEPT = 4096


@dataclass(slots=True, kw_only=True, eq=False)
class LegRecord:
    """Fields as in `worker.proto` `RequestLeg`; `traced_id` is the id that log lines carry."""

    leg_id: str
    traced_id: str = field(default_factory=REQUEST_ID.get)
    accepted_at: float = field(default_factory=time.time)  # unix seconds
    rank: int
    num_prompt_tokens: int
    num_earlier_tokens: int
    peer: WorkerRef | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0
    kv_bytes: int = 0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    num_attempts: int = 0
    num_produced: int = 0  # times that the rank sent tokens
    num_prefilled: int = 0  # of these, those whose token came from prefill
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    finish: str = ""

    def __post_init__(self) -> None:
        if self.peer is not None:
            # A part of a message keeps the whole of it: the request's prompt, for thousands.
            whole, self.peer = self.peer, WorkerRef()
            self.peer.CopyFrom(whole)

    def note_produced(self, produced: Produced) -> None:
        self.num_produced += bool(produced.tokens)
        self.num_accepted_drafts += produced.num_accepted
        self.num_rejected_drafts += produced.num_proposed - produced.num_accepted

    def note_prefill(self, prefilled: Prefilled) -> None:
        """Prefill is through with an attempt. What it found and computed counts once: after a
        preemption the prompt is prefilled again."""
        if not self.num_prefilled:
            self.num_cached_tokens = prefilled.num_cached_tokens
            self.num_computed_tokens = prefilled.num_computed_tokens
        self.num_prefilled += prefilled.token is not None
        self.compute_seconds += prefilled.compute_seconds
        self.transfer_seconds += prefilled.transfer_seconds
        self.kv_bytes += prefilled.kv_bytes

    def message(self, worker: ProcessIdentity) -> RequestLeg:
        """As `worker` tells it."""
        peer = self.peer
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("traced_id", "peer", "num_produced", "num_prefilled"):
            del told[name]
        return RequestLeg(
            **told,
            worker=worker,
            num_preemptions=max(0, self.num_attempts - 1),
            num_steps=max(0, self.num_produced - self.num_prefilled),
            peer=WorkerRefText(
                name=peer.name if peer else "",
                address=peer.address if peer else "",
                epoch=peer.epoch if peer else "",
            ),
        )


class RequestRecords:
    """All legs that are open, and the last `num_kept` that are over."""

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._open: dict[int, LegRecord] = {}  # by identity: ids may come twice
        self._over: deque[LegRecord] = deque(maxlen=num_kept)

    def begin(self, leg: LegRecord) -> LegRecord:
        self._open[id(leg)] = leg
        return leg

    def end(self, leg: LegRecord, finish: str, total_seconds: float) -> None:
        """`finish`: stop, length, or a gRPC status name."""
        leg.finish, leg.total_seconds = finish, total_seconds
        self._open.pop(id(leg), None)
        self._over.append(leg)

    def find(self, request_id: str) -> list[LegRecord]:
        """Legs of a request, a choice or a call, or all under a client's `x-request-id`; in
        order of arrival."""
        found = (leg for leg in self._all() if _belongs(leg, request_id))
        return sorted(found, key=lambda leg: leg.accepted_at)

    def _all(self) -> Iterator[LegRecord]:
        return chain(self._over, self._open.values())


def _belongs(leg: LegRecord, request_id: str) -> bool:
    return leg.traced_id == request_id or is_part_of(leg.leg_id, request_id)
