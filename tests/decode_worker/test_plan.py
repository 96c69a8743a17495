"""The planner: fixed cases, then its promises over random snapshots."""

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.plan import Plan, RequestView, Snapshot, pages_for, plan


def view(request_id: str, num_tokens: int, num_pages: int) -> RequestView:
    return RequestView(request_id=request_id, num_tokens=num_tokens, num_pages=num_pages)


def decide(
    running: list[RequestView],
    waiting: list[RequestView],
    *,
    free: int,
    num_prefilling: int = 0,
    total: int = 100,
    max_running: int = 8,
) -> Plan:
    return plan(
        Snapshot(
            running=running,
            waiting=waiting,
            num_prefilling=num_prefilling,
            pages_free=free,
            pages_total=total,
            page_tokens=4,
            max_running=max_running,
        )
    )


def test_everybody_steps_and_only_those_at_a_page_border_grow() -> None:
    assert decide([view("a", 4, 1), view("b", 5, 1), view("c", 6, 2)], [], free=3) == Plan(
        grow=("b",), step=("a", "b", "c")
    )


def test_the_oldest_takes_the_pages_of_the_youngest() -> None:
    running = [view("a", 5, 1), view("b", 4, 1), view("c", 9, 3)]
    assert decide(running, [], free=0) == Plan(preempt=("c",), grow=("a",), step=("a", "b"))


def test_victims_are_taken_until_there_is_enough_and_not_one_more() -> None:
    running = [view("a", 5, 1), view("b", 5, 1), view("c", 4, 1), view("d", 4, 1)]
    assert decide(running, [], free=0) == Plan(preempt=("d", "c"), grow=("a", "b"), step=("a", "b"))


def test_the_youngest_stalls_rather_than_losing_its_pages() -> None:
    waiting = [view("w", 1, 0)]
    assert decide([view("a", 4, 1), view("b", 5, 1)], waiting, free=0) == Plan(step=("a",))


def test_the_only_one_waits_for_pages_of_prefills_under_way() -> None:
    assert decide([view("a", 5, 1)], [], free=0, num_prefilling=2) == Plan()


def test_a_preempted_one_does_not_come_back_in_the_same_step() -> None:
    running = [view("a", 5, 1), view("b", 17, 5)]
    assert decide(running, [view("w", 1, 0)], free=0) == Plan(
        preempt=("b",), grow=("a",), step=("a",)
    )


def test_waiting_ones_enter_in_order_and_nobody_overtakes() -> None:
    waiting = [view("a", 8, 0), view("b", 40, 0), view("c", 1, 0)]
    assert decide([], waiting, free=6) == Plan(admit=("a",))


def test_headroom_is_kept_for_those_who_grow() -> None:
    # Two are in and one comes: two pages of headroom.
    running = [view("r", 4, 1), view("s", 4, 1)]
    assert decide(running, [view("a", 8, 0)], free=3) == Plan(step=("r", "s"))
    assert decide(running, [view("a", 8, 0)], free=4).admit == ("a",)


def test_alone_a_request_may_have_the_whole_pool() -> None:
    assert decide([], [view("a", 40, 0)], free=10, total=10).admit == ("a",)


def test_places_are_bounded_by_prefilling_ones_too() -> None:
    waiting = [view("a", 1, 0), view("b", 1, 0)]
    assert decide([view("r", 4, 1)], waiting, free=90, num_prefilling=1, max_running=3).admit == (
        "a",
    )


requests = st.integers(1, 60).flatmap(
    lambda tokens: st.tuples(st.just(tokens), st.sampled_from([0, 1]))
)


@given(
    running=st.lists(requests, max_size=8),
    waiting=st.lists(st.integers(1, 60), max_size=6),
    free=st.integers(0, 30),
    num_prefilling=st.integers(0, 3),
    prefilling_pages=st.integers(0, 20),
)
def test_promises(
    running: list[tuple[int, int]],
    waiting: list[int],
    free: int,
    num_prefilling: int,
    prefilling_pages: int,
) -> None:
    # A running request lacks at most the page for its last token.
    rows = [
        view(f"r{index}", tokens, max(1, pages_for(tokens, 4) - lacking * (tokens % 4 == 1)))
        for index, (tokens, lacking) in enumerate(running)
    ]
    queue = [view(f"w{index}", tokens, 0) for index, tokens in enumerate(waiting)]
    total = free + sum(row.num_pages for row in rows) + prefilling_pages
    decided = decide(rows, queue, free=free, num_prefilling=num_prefilling, total=max(total, 1))
    held = {row.request_id: row.num_pages for row in rows}
    need = {row.request_id: pages_for(row.num_tokens, 4) for row in (*rows, *queue)}
    left = (
        free
        + sum(held[name] for name in decided.preempt)
        - len(decided.grow)
        - sum(need[name] for name in decided.admit)
    )
    assert left >= 0
    for name in decided.step:
        assert held[name] + (name in decided.grow) >= need[name]
    assert not set(decided.step) & set(decided.preempt)
    # Victims are the youngest, and older ones step before younger ones do.
    names = [row.request_id for row in rows]
    assert list(decided.preempt) == names[::-1][: len(decided.preempt)]
    assert list(decided.step) == names[: len(decided.step)]
    if rows and (free or len(rows) > 1):
        assert decided.step[:1] == ("r0",)
    if decided.preempt or len(decided.step) + len(decided.preempt) < len(rows):
        assert decided.admit == ()
    assert decided.admit == tuple(row.request_id for row in queue[: len(decided.admit)])
    assert len(rows) + num_prefilling + len(decided.admit) <= max(8, len(rows) + num_prefilling)
