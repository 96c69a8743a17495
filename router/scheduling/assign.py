"""Assignment with a bounded wait for room: by priority, equal ones in the order in which they
first asked, be it another router or in an earlier call."""

import asyncio
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field

from core.clock import Clock
from core.errors import Draining, EpserveError, Overloaded, Unavailable
from core.prefix_index import PrefixIndex
from router.scheduling.assignment_records import AssignmentRecords
from router.scheduling.choose import Considered, Pair, Weights, choose
from router.scheduling.demand import Demand
from router.workers.departures import Departures
from router.workers.table import WorkerTable
from router.workers.worker import Pending


@dataclass(frozen=True, slots=True)
class Assignment:
    """A pair, and what each of the two is charged with until its status shows the request."""

    pair: Pair
    queue_seconds: float
    prefill_pending: Pending
    decode_pending: Pending


@dataclass(slots=True, eq=False)
class _Waiting:
    demand: Demand
    since: float
    placed: asyncio.Future[Assignment]
    considered: Considered = field(default_factory=Considered)

    @property
    def place(self) -> tuple[int, float]:
        """Lower ones come first."""
        return -self.demand.priority, self.since - self.demand.waited_seconds


class Assigner:
    """Every Assign call joins the queue; `wake` goes through it in order and takes out each
    call that has a pair or can have none. Call `wake` after every change of the table: nothing
    here polls. Of more than `max_waiting` calls the last in line is refused, which need not be
    the last to come: who asks again stands where it stood."""

    def __init__(
        self,
        table: WorkerTable,
        index: PrefixIndex,
        clock: Clock,
        weights: Weights,
        records: AssignmentRecords,
        departures: Departures,
        *,
        max_waiting: int,
        max_wait_seconds: float,
    ) -> None:
        self._table = table
        self._index = index
        self._clock = clock
        self._weights = weights
        self._records = records
        self._departures = departures
        self._max_waiting = max_waiting
        self._max_wait_seconds = max_wait_seconds
        self._queue: OrderedDict[_Waiting, None] = OrderedDict()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def longest_wait_seconds(self) -> float:
        """Of the calls that wait now; 0 when none does."""
        now = self._clock.now()
        return max((now - waiting.since for waiting in self._queue), default=0.0)

    async def assign(self, demand: Demand) -> Assignment:
        """A pair for `demand`, as soon as one has room.

        Raises Overloaded when the queue is full or the wait too long, and what `choose`
        raises. A cancelled call gives its place, or its room, back.
        """
        if self._closed:
            raise Draining("the router is stopping")
        waiting = _Waiting(demand, self._clock.now(), asyncio.get_running_loop().create_future())
        self._queue[waiting] = None
        self.wake()
        if len(self._queue) > self._max_waiting:
            self._refuse_last()
        outcome = "INTERNAL"
        try:
            assignment = await self._placed(waiting)
            outcome = "ok"
            return assignment
        except EpserveError as error:
            outcome = error.status.grpc
            raise
        except asyncio.CancelledError:
            outcome = "CANCELLED"
            if _is_placed(waiting):
                self._release(waiting.placed.result())
            raise
        finally:
            self._queue.pop(waiting, None)
            self._record(waiting, outcome)

    async def _placed(self, waiting: _Waiting) -> Assignment:
        seconds_left = max(0.0, self._max_wait_seconds - waiting.demand.searched_seconds)
        try:
            async with asyncio.timeout(seconds_left):
                return await waiting.placed
        except TimeoutError:
            if _is_placed(waiting):
                return waiting.placed.result()
            raise self._overloaded(f"no room within {self._max_wait_seconds:g} s") from None

    def wake(self) -> None:
        """Gives waiting calls what there is by now."""
        if not self._queue:
            return
        now = self._clock.now()
        self._table.expire(now)
        workers = self._table.workers
        capacities = sorted({worker.capacity_tokens for worker in workers})
        # Calls that the same workers could take: if one found no room, neither will the next.
        full: dict[tuple[str, frozenset[str], int], Considered] = {}
        for waiting in self._line():
            demand = waiting.demand
            kind = (
                demand.model,
                demand.excluded,
                bisect_left(capacities, demand.num_prompt_tokens),
            )
            if kind in full:
                waiting.considered = full[kind]
                continue
            waiting.considered = considered = Considered()
            try:
                pair = choose(demand, workers, self._index, self._weights, considered)
            except EpserveError as error:
                self._queue.pop(waiting)
                if isinstance(error, Unavailable) and self._departures.replacement_expected(now):
                    error = Draining(f"{error.message}; some are being replaced")
                waiting.placed.set_exception(error)
                continue
            if pair is None:
                full[kind] = considered
                continue
            self._queue.pop(waiting)
            waiting.placed.set_result(self._place(waiting, pair, now))

    def _line(self) -> list[_Waiting]:
        """Those that wait, in order; whose call is ending this moment do not."""
        waiting = [one for one in self._queue if not one.placed.done()]
        return sorted(waiting, key=lambda one: one.place)

    def _refuse_last(self) -> None:
        line = self._line()
        if len(line) > self._max_waiting:
            last = line[-1]
            why = f"{len(line) - 1} requests wait for room already"
            last.placed.set_exception(self._overloaded(why))
            self._queue.pop(last)

    def problem(self, model: str) -> str:
        """Why no request for `model` would be placed, were it as short as can be; "" if it would.
        Workers that are full are no problem: calls wait for them."""
        if self._closed:
            return "the router is stopping"
        demand = Demand(request_id="", model=model, num_prompt_tokens=1)
        try:
            choose(demand, self._table.workers, self._index, self._weights, Considered())
        except EpserveError as error:
            return error.message
        return ""

    def close(self) -> None:
        """Ends all waiting calls with Draining, and all later ones."""
        self._closed = True
        for waiting in list(self._queue):
            if not waiting.placed.done():
                waiting.placed.set_exception(Draining("the router is stopping"))
        self._queue.clear()

    def _place(self, waiting: _Waiting, pair: Pair, now: float) -> Assignment:
        demand, page_tokens = waiting.demand, pair.decode.status.page_tokens
        matched_tokens = pair.num_matched_pages * page_tokens
        prefill = Pending(
            assigned_at=now,
            num_tokens=max(1, demand.num_prompt_tokens - matched_tokens),
            num_pages=0,
        )
        decode = Pending(
            assigned_at=now,
            num_tokens=0,
            num_pages=demand.num_prompt_tokens // page_tokens + 1,
        )
        self._table.assigned(pair.prefill, prefill)
        self._table.assigned(pair.decode, decode)
        self._index.record(pair.prefill.epoch, demand.prefix_hashes)
        return Assignment(pair, now - waiting.since, prefill, decode)

    def _record(self, waiting: _Waiting, outcome: str) -> None:
        pair, queue_seconds = None, self._clock.now() - waiting.since
        if outcome == "ok":
            assignment = waiting.placed.result()
            pair, queue_seconds = assignment.pair, assignment.queue_seconds
        self._records.add(waiting.demand, outcome, queue_seconds, pair, waiting.considered)

    def _release(self, assignment: Assignment) -> None:
        self._table.released(assignment.pair.prefill, assignment.prefill_pending)
        self._table.released(assignment.pair.decode, assignment.decode_pending)
        self.wake()

    def _overloaded(self, why: str) -> Overloaded:
        seconds = self._table.completions.retry_after_seconds(
            len(self._queue) - 1, self._clock.now()
        )
        return Overloaded(f"all decode workers are full: {why}", retry_after_seconds=seconds)


def _is_placed(waiting: _Waiting) -> bool:
    placed = waiting.placed
    return placed.done() and not placed.cancelled() and placed.exception() is None
