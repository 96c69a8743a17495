"""Each filter and scorer alone, on workers made for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.demand import Demand
from router.scheduling.filters import FILTERS
from router.scheduling.scorers import DECODE_SCORERS, PREFILL_SCORERS, Candidate, score
from router.workers.worker import Load, Pending, Worker, status_problem
from tests.router.statuses import ROLES, make_status


def make_worker(role: str, *, lost: bool = False, pending: int = 0, **facts: int) -> Worker:
    """`pending` requests of 64 tokens and one page are on their way."""
    status = make_status(role, f"{role}-epoch", **facts)
    worker = Worker(
        address="h:1",
        role=ROLES[role],
        status=status,
        load=Load.of(status),
        problem=status_problem(status, ROLES[role]),
        lost=lost,
    )
    for _ in range(pending):
        worker.pending.append(Pending(assigned_at=0, num_tokens=64, num_pages=1))
    return worker


def make_demand(tokens: int = 640, *, model: str = "demo", excluded: str = "") -> Demand:
    return Demand(
        request_id="r",
        model=model,
        num_prompt_tokens=tokens,
        excluded=frozenset(excluded.split()),
    )


@pytest.mark.parametrize(
    ("name", "worker", "demand", "passes"),
    [
        ("registered", make_worker("decode"), make_demand(), True),
        ("registered", make_worker("decode", ready=0), make_demand(), True),
        ("registered", make_worker("decode", lost=True), make_demand(), False),
        ("registered", make_worker("decode", max_running=0), make_demand(), False),
        ("serves_model", make_worker("decode"), make_demand(), True),
        ("serves_model", make_worker("decode"), make_demand(model="x"), False),
        ("ready", make_worker("decode"), make_demand(), True),
        ("ready", make_worker("decode", ready=0), make_demand(), False),
        ("ready", make_worker("decode", draining=1), make_demand(), False),
        ("ready", make_worker("decode", lost=True), make_demand(), False),
        ("fits", make_worker("decode"), make_demand(4095), True),
        ("fits", make_worker("decode"), make_demand(4096), False),
        # Two ranks of four pages: a prompt lives on one rank, decode needs a token more.
        ("fits", make_worker("decode", num_ranks=2, pages_total=4), make_demand(255), True),
        ("fits", make_worker("decode", num_ranks=2, pages_total=4), make_demand(256), False),
        ("fits", make_worker("prefill", pages_total=4), make_demand(256), True),
        ("fits", make_worker("prefill", pages_total=4), make_demand(257), False),
        ("not_excluded", make_worker("decode"), make_demand(excluded="a b"), True),
        ("not_excluded", make_worker("decode"), make_demand(excluded="decode-epoch"), False),
        ("registered", make_worker("decode", ready=0, stalled=1), make_demand(), True),
        ("ready", make_worker("decode", ready=0, stalled=1), make_demand(), False),
        ("not_slow", make_worker("decode"), make_demand(), True),
        ("not_slow", make_worker("decode", slow=1), make_demand(), False),
        ("has_room", make_worker("decode", num_running=2, num_waiting=1), make_demand(), True),
        ("has_room", make_worker("decode", num_running=2, num_waiting=2), make_demand(), False),
        ("has_room", make_worker("decode", num_running=3, pending=1), make_demand(), False),
        ("has_room", make_worker("decode", num_ranks=2, num_running=3), make_demand(), True),
        ("has_room", make_worker("prefill", num_waiting=99), make_demand(), True),
    ],
)
def test_filter(name: str, worker: Worker, demand: Demand, passes: bool) -> None:
    assert FILTERS[name](worker, demand) is passes


@pytest.mark.parametrize(
    ("name", "candidate", "expected"),
    [
        ("prefix_affinity", Candidate(make_worker("prefill"), 0), 0.0),
        ("prefix_affinity", Candidate(make_worker("prefill"), 5), 0.5),
        ("prefix_affinity", Candidate(make_worker("prefill"), 10), 1.0),
        ("load", Candidate(make_worker("prefill")), 1.0),
        ("load", Candidate(make_worker("prefill", waiting_tokens=640)), 0.5),
        ("load", Candidate(make_worker("prefill", pending=10)), 0.5),
        # Two ranks work on it: only half of it is in front of a request.
        ("load", Candidate(make_worker("prefill", num_ranks=2, waiting_tokens=640)), 0.5),
        ("load", Candidate(make_worker("prefill", num_ranks=2, pending=20)), 0.5),
        ("free_pages", Candidate(make_worker("decode", pages_free=100)), 1.0),
        ("free_pages", Candidate(make_worker("decode", pages_free=30, pending=5)), 0.25),
        ("free_pages", Candidate(make_worker("decode", pages_free=3, pending=5)), 0.0),
        ("free_slots", Candidate(make_worker("decode")), 1.0),
        ("free_slots", Candidate(make_worker("decode", num_running=1, num_waiting=1)), 0.5),
        ("free_slots", Candidate(make_worker("decode", num_running=3, pending=4)), 0.0),
    ],
)
def test_scorer(name: str, candidate: Candidate, expected: float) -> None:
    scorer = {**PREFILL_SCORERS, **DECODE_SCORERS}[name]
    assert scorer(candidate, make_demand(640)) == pytest.approx(expected)


numbers = st.integers(0, 2**31)


@given(tokens=st.integers(1, 2**31), matched=numbers, waiting=numbers, free=numbers, run=numbers)
def test_scores_stay_between_0_and_1(
    tokens: int, matched: int, waiting: int, free: int, run: int
) -> None:
    """Whatever a peer tells of itself, also what cannot be."""
    worker = make_worker("decode", waiting_tokens=waiting, pages_free=free, num_running=run)
    candidate = Candidate(worker, matched)
    for scorer in (*PREFILL_SCORERS.values(), *DECODE_SCORERS.values()):
        assert 0 <= scorer(candidate, make_demand(tokens)) <= 1


@given(st.integers(1, 9), st.integers(0, 40))
def test_a_whole_match_wins_just_while_it_saves_more_than_waits_there(
    pages: int, waiting_pages: int
) -> None:
    """The reason for the default weights, as the docstring of `load` gives it."""
    demand = make_demand(pages * 64)
    weights = {"prefix_affinity": 0.5, "load": 1.0}
    holder = Candidate(make_worker("prefill", waiting_tokens=waiting_pages * 64), pages)
    idle = Candidate(make_worker("prefill"))
    advantage = (
        score(holder, demand, PREFILL_SCORERS, weights).total
        - score(idle, demand, PREFILL_SCORERS, weights).total
    )
    if waiting_pages == pages:
        assert advantage == pytest.approx(0)
    else:
        assert (advantage > 0) == (waiting_pages < pages)


def test_weights() -> None:
    candidate = Candidate(make_worker("decode", pages_free=100, num_running=2))
    scorers, demand = DECODE_SCORERS, make_demand()
    scored = score(candidate, demand, scorers, {"free_pages": 3, "free_slots": 1})
    assert scored.scores == (1.0, 0.5)
    assert scored.total == 0.875
    assert score(candidate, demand, scorers, {"free_pages": 0, "free_slots": 0}).total == 0
