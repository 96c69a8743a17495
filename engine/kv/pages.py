"""The KV pages of one rank: who holds which page.

    free --allocate/grow--> owned(owner) --free--------------------------> free
                            owned(owner) --cache--> cached --uncache-----> free
                            owned(owner) --quarantine--> quarantined(attempt) --release--> free

`cached` pages belong to the prefix tree. `quarantined` ones may still be written to by a peer
and belong to no request until `release`. Every page is in exactly one state at any time.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from engine.kv.free_runs import FreeRuns
from engine.link.messages import PageRun

_FREE, _OWNED, _CACHED, _QUARANTINED = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """Pages by state; the four states add up to `total`."""

    total: int
    free: int
    owned: int
    cached: int
    quarantined: int


def runs_of(pages: Sequence[int]) -> list[PageRun]:
    """Pages in token order as the fewest runs: [4, 5, 6, 2] -> (4, 3), (2, 1)."""
    runs: list[PageRun] = []
    begin = 0
    for index in range(1, len(pages) + 1):
        if index == len(pages) or pages[index] != pages[index - 1] + 1:
            runs.append(PageRun(first=pages[begin], count=index - begin))
            begin = index
    return runs


def pages_of(runs: Iterable[PageRun]) -> list[int]:
    """The inverse of `runs_of`."""
    return [page for run in runs for page in range(run.first, run.first + run.count)]


class PagePool:
    """Owners and attempts are whatever hashable names the caller gives them.

    Methods raise ValueError for pages that are not in the state they need, and then change
    nothing.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, got {num_pages}")
        self._state = bytearray(num_pages)
        self._free = FreeRuns(num_pages)
        self._owned: dict[Hashable, list[int]] = {}
        self._quarantined: dict[Hashable, list[int]] = {}
        self._num_owned = 0
        self._num_cached = 0
        self._num_quarantined = 0

    @property
    def num_free(self) -> int:
        return self._free.num_pages

    def counts(self) -> PageCounts:
        return PageCounts(
            total=len(self._state),
            free=self._free.num_pages,
            owned=self._num_owned,
            cached=self._num_cached,
            quarantined=self._num_quarantined,
        )

    def pages(self, owner: Hashable) -> tuple[int, ...]:
        """Pages of an owner in the order in which it got them; () for an unknown one."""
        return tuple(self._owned.get(owner, ()))

    def allocate(self, owner: Hashable, num_pages: int) -> list[PageRun]:
        """Gives `owner` more pages, in as few and as long runs as possible.

        ValueError when fewer than `num_pages` are free.
        """
        runs = self._free.take(num_pages)
        self._own(owner, pages_of(runs))
        return runs

    def grow(self, owner: Hashable) -> int:
        """Gives `owner` one more page, the one after its last if that is free."""
        owned = self._owned.get(owner)
        page = owned[-1] + 1 if owned else -1
        if not self._free.take_page(page):
            page = self._free.take(1)[0].first
        self._own(owner, [page])
        return page

    def free(self, owner: Hashable) -> int:
        """Frees all pages of an owner; how many there were (0 for an unknown one)."""
        pages = self._owned.pop(owner, [])
        self._num_owned -= len(pages)
        self._to_free(pages)
        return len(pages)

    def cache(self, owner: Hashable, pages: Sequence[int]) -> None:
        """Hands pages of an owner to the prefix tree."""
        given = set(pages)
        owned = self._owned.get(owner, [])
        if len(given) != len(pages) or not given.issubset(owned):
            raise ValueError(f"pages {list(pages)} are not all owned by {owner!r}")
        self._mark(pages, _CACHED)
        self._num_owned -= len(pages)
        self._num_cached += len(pages)
        rest = [page for page in owned if page not in given]
        if rest:
            self._owned[owner] = rest
        else:
            self._owned.pop(owner, None)

    def uncache(self, pages: Sequence[int]) -> None:
        """Frees pages that the prefix tree has given up."""
        if len(set(pages)) != len(pages) or any(self._state[page] != _CACHED for page in pages):
            raise ValueError(f"pages {list(pages)} are not all cached")
        self._num_cached -= len(pages)
        self._to_free(list(pages))

    def quarantine(self, owner: Hashable, attempt: Hashable) -> int:
        """Moves all pages of an owner into quarantine under `attempt`; how many there were."""
        if attempt in self._quarantined:
            raise ValueError(f"attempt {attempt!r} is quarantined already")
        pages = self._owned.pop(owner, [])
        if pages:
            self._quarantined[attempt] = pages
            self._mark(pages, _QUARANTINED)
            self._num_owned -= len(pages)
            self._num_quarantined += len(pages)
        return len(pages)

    def release(self, attempt: Hashable) -> int:
        """Frees what is quarantined under `attempt`; how many pages (0 for an unknown one)."""
        pages = self._quarantined.pop(attempt, [])
        self._num_quarantined -= len(pages)
        self._to_free(pages)
        return len(pages)

    def check_integrity(self) -> None:
        """Asserts that every page is in exactly one state and that all counts are right."""
        self._free.check_integrity()
        seen = bytearray(len(self._state))
        held = [(_FREE, pages_of(self._free))]
        held += [(_OWNED, pages) for pages in self._owned.values()]
        held += [(_QUARANTINED, pages) for pages in self._quarantined.values()]
        for state, pages in held:
            for page in pages:
                assert self._state[page] == state, (page, state, self._state[page])
                assert not seen[page], page
                seen[page] = 1
        cached = [page for page, state in enumerate(self._state) if state == _CACHED]
        assert not any(seen[page] for page in cached)
        assert sum(seen) + len(cached) == len(self._state)
        assert len(cached) == self._num_cached
        assert self._num_owned == sum(len(pages) for pages in self._owned.values())
        assert self._num_quarantined == sum(len(pages) for pages in self._quarantined.values())
        assert all(self._owned.values())

    def _own(self, owner: Hashable, pages: list[int]) -> None:
        if not pages:
            return
        self._mark(pages, _OWNED)
        self._num_owned += len(pages)
        self._owned.setdefault(owner, []).extend(pages)

    def _to_free(self, pages: list[int]) -> None:
        self._mark(pages, _FREE)
        for run in runs_of(sorted(pages)):
            self._free.add(run.first, run.count)

    def _mark(self, pages: Sequence[int], state: int) -> None:
        for page in pages:
            self._state[page] = state
