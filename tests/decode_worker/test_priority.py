"""Who goes first and who is put back, by priority."""

import msgspec

from decode_worker.events import Admit, Event, Grow, Preempt
from decode_worker.plan import Plan, plan
from decode_worker.request import RequestPhase
from decode_worker.state import RankState
from engine.link.messages import Reserved
from tests.decode_worker.books import all_kv, make_state, prefilled, stepped, submit


def give(state: RankState, *events: Event) -> list[object]:
    return [message for event in events for message in state.step(event, 0.0)]


def start(state: RankState, request_id: str, priority: int) -> None:
    """Two pages of four tokens each are held from now on; seven tokens are known."""
    give(state, msgspec.structs.replace(submit(request_id), priority=priority))
    (reserved,) = give(state, Admit(request_id))
    assert isinstance(reserved, Reserved)
    arrived = prefilled(reserved.attempt_id, request_id=request_id)
    give(state, arrived, all_kv(reserved.attempt_id))
    assert state.requests[request_id].phase is RequestPhase.RUNNING


def test_the_lowest_priority_gives_its_pages_up_then_the_youngest() -> None:
    state = make_state(num_pages=8)
    for request_id, priority in (("low", -1), ("old", 0), ("young", 0), ("high", 2)):
        start(state, request_id, priority)
    preempted = []
    for _ in range(20):
        decided = plan(state.snapshot())
        give(state, *map(Preempt, decided.preempt), *map(Grow, decided.grow))
        preempted += decided.preempt
        give(state, *stepped(*decided.step))
        if "high" not in state.requests:
            break
    assert preempted == ["low", "young"]
    assert "high" not in state.requests  # it was served all the time


def test_waiting_ones_are_let_in_by_priority_and_a_preempted_one_keeps_its_place() -> None:
    state = make_state(num_pages=20)
    start(state, "first", 0)
    for request_id, priority in (("a", 0), ("b", 3), ("c", -2), ("d", 3)):
        give(state, msgspec.structs.replace(submit(request_id), priority=priority))
    give(state, Preempt("first"))
    waiting = [view.request_id for view in state.snapshot().waiting]
    assert waiting == ["b", "d", "first", "a", "c"]
    assert plan(state.snapshot()) == Plan(admit=("b", "d", "first", "a", "c"))
