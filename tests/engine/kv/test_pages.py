"""The page pool against a naive model: every page in one state, best fit, nothing lost."""

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.pages import PagePool, pages_of, runs_of
from engine.link.messages import PageRun

NUM_PAGES = 40
OWNERS = st.sampled_from(["a", "b", "c", "d", "e"])


class PoolMachine(RuleBasedStateMachine):
    """The model is one dict: page -> who holds it ("free", "cached", owner or attempt)."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.holder: dict[int, tuple[str, ...]] = dict.fromkeys(range(NUM_PAGES), ("free",))
        self.num_attempts = 0

    def held(self, *holder: str) -> list[int]:
        return [page for page, held_by in self.holder.items() if held_by == holder]

    @rule(owner=OWNERS, count=st.integers(0, 12))
    def allocate(self, owner: str, count: int) -> None:
        free = set(self.held("free"))
        if count > len(free):
            with pytest.raises(ValueError, match="are free"):
                self.pool.allocate(owner, count)
            return
        runs = self.pool.allocate(owner, count)
        pages = pages_of(runs)
        assert len(pages) == count == len(set(pages))
        assert set(pages) <= free
        lengths = [run.count for run in runs_of(sorted(free))]
        fitting = [length for length in lengths if length >= count]
        if count and fitting:  # best fit: one run, cut from the smallest that holds it
            assert len(runs) == 1
            cut_from = [run for run in runs_of(sorted(free)) if run.first == runs[0].first]
            assert [run.count for run in cut_from] == [min(fitting)]
        self.holder.update(dict.fromkeys(pages, ("owner", owner)))

    @precondition(lambda self: self.held("free"))
    @rule(owner=OWNERS)
    def grow(self, owner: str) -> None:
        owned = self.pool.pages(owner)
        page = self.pool.grow(owner)
        assert self.holder[page] == ("free",)
        if owned and self.holder.get(owned[-1] + 1) == ("free",):
            assert page == owned[-1] + 1
        self.holder[page] = ("owner", owner)

    @rule(owner=OWNERS)
    def free(self, owner: str) -> None:
        pages = self.held("owner", owner)
        assert self.pool.free(owner) == len(pages)
        self.holder.update(dict.fromkeys(pages, ("free",)))

    @rule(owner=OWNERS, data=st.data())
    def cache(self, owner: str, data: st.DataObject) -> None:
        owned = self.held("owner", owner)
        if not owned:
            return
        pages = data.draw(st.lists(st.sampled_from(owned), unique=True))
        self.pool.cache(owner, pages)
        self.holder.update(dict.fromkeys(pages, ("cached",)))

    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        cached = self.held("cached")
        if not cached:
            return
        pages = data.draw(st.lists(st.sampled_from(cached), unique=True))
        self.pool.uncache(pages)
        self.holder.update(dict.fromkeys(pages, ("free",)))

    @rule(owner=OWNERS)
    def quarantine(self, owner: str) -> None:
        pages = self.held("owner", owner)
        self.num_attempts += 1
        attempt = f"attempt {self.num_attempts}"
        assert self.pool.quarantine(owner, attempt) == len(pages)
        self.holder.update(dict.fromkeys(pages, ("attempt", attempt)))

    @precondition(lambda self: self.num_attempts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        attempt = f"attempt {data.draw(st.integers(1, self.num_attempts))}"
        pages = self.held("attempt", attempt)
        assert self.pool.release(attempt) == len(pages)
        self.holder.update(dict.fromkeys(pages, ("free",)))

    @invariant()
    def every_page_has_one_holder(self) -> None:
        self.pool.check_integrity()
        counts = self.pool.counts()
        assert counts.total == NUM_PAGES
        assert counts.free == self.pool.num_free == len(self.held("free"))
        assert counts.cached == len(self.held("cached"))
        assert counts.owned == sum(held_by[0] == "owner" for held_by in self.holder.values())
        for owner in "abcde":
            assert set(self.pool.pages(owner)) == set(self.held("owner", owner))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_runs_and_pages_are_inverse() -> None:
    pages = [4, 5, 6, 2, 3, 9]
    assert runs_of(pages) == [
        PageRun(first=4, count=3),
        PageRun(first=2, count=2),
        PageRun(first=9, count=1),
    ]
    assert pages_of(runs_of(pages)) == pages
    assert runs_of([]) == []


def test_a_long_request_gets_the_longest_runs_when_none_is_long_enough() -> None:
    pool = PagePool(20)
    for owner in range(10):
        pool.allocate(owner, 2)
    for owner in (1, 2, 4, 7, 8, 9):  # free: 2..5, 8..9, 14..19
        pool.free(owner)
    assert pool.allocate("long", 9) == [PageRun(first=14, count=6), PageRun(first=2, count=3)]


def test_pages_in_another_state_are_refused_and_nothing_changes() -> None:
    pool = PagePool(8)
    pool.allocate("a", 3)
    with pytest.raises(ValueError, match="not all owned"):
        pool.cache("a", [0, 5])
    with pytest.raises(ValueError, match="not all owned"):
        pool.cache("a", [1, 1])
    with pytest.raises(ValueError, match="not all cached"):
        pool.uncache([0])
    pool.quarantine("a", "attempt")
    pool.allocate("a", 1)
    with pytest.raises(ValueError, match="quarantined already"):
        pool.quarantine("a", "attempt")
    pool.check_integrity()
    assert pool.free("nobody") == pool.release("nobody") == 0


def test_a_pool_of_100_000_pages_is_fast() -> None:
    """A step may touch some dozens of owners; a fragmented pool must not show in it."""
    pool = PagePool(100_000)
    for owner in range(50_000):
        pool.allocate(owner, 2)
    for owner in range(0, 50_000, 2):
        pool.free(owner)  # 25,000 holes
    begin = time.process_time()
    for round_number in range(200):
        pool.allocate("x", 64 + round_number % 7)
        pool.grow("x")
        pool.free("x")
    each_seconds = (time.process_time() - begin) / 200
    assert each_seconds < 0.02, each_seconds
    pool.check_integrity()
