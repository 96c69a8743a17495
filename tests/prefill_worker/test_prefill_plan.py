"""Chunk planning: budget, page borders, order, and that nobody starves."""

from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.plan import Candidate, Chunk, plan_chunks

PAGE = 4


def candidate(name: str, num_tokens: int, done: int = 0, needed: int = 0) -> Candidate:
    return Candidate(
        attempt_id=name, num_tokens=num_tokens, num_done_tokens=done, num_pages_needed=needed
    )


def plan(candidates: list[Candidate], budget: int = 16, pages: int = 100) -> list[Chunk]:
    return list(
        plan_chunks(candidates, budget_tokens=budget, page_tokens=PAGE, num_available_pages=pages)
    )


def spans(chunks: list[Chunk]) -> list[tuple[str, int, int, bool]]:
    return [(chunk.attempt_id, chunk.begin, chunk.end, chunk.is_last) for chunk in chunks]


@st.composite
def waiting_lists(draw: st.DrawFn) -> list[Candidate]:
    made = []
    for index in range(draw(st.integers(0, 8))):
        num_tokens = draw(st.integers(1, 60))
        done = draw(st.integers(0, (num_tokens - 1) // PAGE)) * PAGE
        needed = draw(st.sampled_from([0, -(-num_tokens // PAGE)]))
        made.append(candidate(f"a{index}", num_tokens, done, needed))
    return made


@given(candidates=waiting_lists(), budget=st.integers(PAGE, 70), pages=st.integers(0, 40))
def test_every_plan_is_sound(candidates: list[Candidate], budget: int, pages: int) -> None:
    chunks = plan(candidates, budget, pages)
    by_name = {c.attempt_id: c for c in candidates}
    order = [c.attempt_id for c in candidates]
    assert [order.index(chunk.attempt_id) for chunk in chunks] == sorted(
        order.index(chunk.attempt_id) for chunk in chunks
    )
    assert sum(chunk.end - chunk.begin for chunk in chunks) <= budget
    for chunk in chunks:
        origin = by_name[chunk.attempt_id]
        assert chunk.begin == origin.num_done_tokens < chunk.end <= origin.num_tokens
        assert chunk.is_last == (chunk.end == origin.num_tokens)
        assert chunk.is_last or chunk.end % PAGE == 0
    assert sum(by_name[chunk.attempt_id].num_pages_needed for chunk in chunks) <= pages
    if any(not c.num_pages_needed for c in candidates):
        assert chunks  # what holds pages progresses
    if candidates and candidates[0].num_pages_needed <= pages:
        assert chunks[0].attempt_id == order[0]  # the oldest always progresses


def run_to_end(candidates: list[Candidate], budget: int) -> dict[str, int]:
    """Steps until all are computed; the step in which each one ended."""
    ended: dict[str, int] = {}
    step = 0
    while candidates:
        step += 1
        chunks = {chunk.attempt_id: chunk for chunk in plan(candidates, budget)}
        ended |= {name: step for name, chunk in chunks.items() if chunk.is_last}
        candidates = [
            candidate(c.attempt_id, c.num_tokens, chunks[c.attempt_id].end)
            if c.attempt_id in chunks
            else c
            for c in candidates
            if c.attempt_id not in ended
        ]
    return ended


def test_a_long_prompt_alone_gets_the_whole_budget() -> None:
    assert spans(plan([candidate("long", 100)])) == [("long", 0, 16, False)]


def test_a_short_prompt_behind_a_long_one_ends_in_the_first_step() -> None:
    chunks = plan([candidate("long", 1000), candidate("short", 5)])
    assert spans(chunks) == [("long", 0, 8, False), ("short", 0, 5, True)]


def test_what_others_leave_goes_to_the_oldest() -> None:
    chunks = plan([candidate("long", 1000), candidate("short", 2)], budget=33)
    assert spans(chunks) == [("long", 0, 28, False), ("short", 0, 2, True)]


def test_a_stream_of_short_prompts_does_not_stop_a_long_one() -> None:
    long_one = candidate("long", 64)
    for step in range(8):
        chunks = plan([long_one] + [candidate(f"s{step}-{i}", 8) for i in range(20)])
        assert chunks[0].attempt_id == "long"
        long_one = candidate("long", 64, chunks[0].end)
        if chunks[0].is_last:
            break
    assert chunks[0].is_last


def test_shortest_remaining_goes_first_behind_the_oldest() -> None:
    ended = run_to_end(
        [candidate("a", 80), candidate("b", 40), candidate("c", 8), candidate("d", 16)], 16
    )
    assert ended["c"] < ended["d"] < ended["b"]
    assert ended["a"] <= 10


def test_prompts_are_admitted_in_order_as_long_as_pages_last() -> None:
    waiting = [
        candidate("a", 8, needed=2),
        candidate("b", 40, needed=10),
        candidate("c", 4, needed=1),
    ]
    assert spans(plan(waiting, budget=64, pages=5)) == [("a", 0, 8, True)]
    running = [*waiting, candidate("d", 4, needed=0)]
    assert [chunk.attempt_id for chunk in plan(running, budget=64, pages=5)] == ["a", "d"]


def test_known_prefixes_are_not_computed() -> None:
    assert spans(plan([candidate("a", 11, done=8, needed=3)])) == [("a", 8, 11, True)]


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert plan([]) == []
    assert plan([candidate("a", 8, needed=2)], pages=1) == []


def test_higher_priorities_get_the_budget_first() -> None:
    """Half goes to the first one; of the rest, a long prompt of higher priority goes first."""
    candidates = [
        Candidate(
            attempt_id=name,
            num_tokens=num_tokens,
            num_done_tokens=0,
            num_pages_needed=0,
            priority=priority,
        )
        for name, num_tokens, priority in (("a", 400, 2), ("b", 300, 1), ("c", 10, 0))
    ]
    chunks = plan_chunks(candidates, budget_tokens=64, page_tokens=8, num_available_pages=100)
    assert [(chunk.attempt_id, chunk.end) for chunk in chunks] == [("a", 32), ("b", 32)]
