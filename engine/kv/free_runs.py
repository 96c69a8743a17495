"""The free pages of a pool as maximal runs, handed out best fit first."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.link.messages import PageRun


class FreeRuns:
    """Disjoint runs, never two adjacent ones. Costs are in runs, not in pages: a lookup is a
    bisection, an update moves at most a few hundred kilobytes of list."""

    def __init__(self, num_pages: int) -> None:
        self._length: dict[int, int] = {}  # first page -> length
        self._first: dict[int, int] = {}  # page after the run -> first page
        self._by_size: list[tuple[int, int]] = []  # (length, first), sorted
        self.num_pages = 0
        if num_pages:
            self.add(0, num_pages)

    def add(self, first: int, count: int) -> None:
        """Puts pages back; they must not be free."""
        self.num_pages += count
        before = self._first.get(first)
        if before is not None:
            count += self._remove(before)
            first = before
        after = first + count
        if after in self._length:
            count += self._remove(after)
        self._insert(first, count)

    def take(self, count: int) -> list[PageRun]:
        """`count` pages in as few runs as possible: the smallest run that holds what is left,
        else the longest there is. ValueError when fewer are free."""
        if count > self.num_pages:
            raise ValueError(f"{count} pages wanted, {self.num_pages} are free")
        taken: list[PageRun] = []
        while count:
            index = bisect_left(self._by_size, (count, 0))
            length, first = self._by_size[min(index, len(self._by_size) - 1)]
            part = min(length, count)
            self._take_head(first, part)
            taken.append(PageRun(first=first, count=part))
            count -= part
        return taken

    def take_page(self, page: int) -> bool:
        """Takes `page` if a free run begins there."""
        if page not in self._length:
            return False
        self._take_head(page, 1)
        return True

    def __iter__(self) -> Iterator[PageRun]:
        return (PageRun(first=first, count=count) for first, count in sorted(self._length.items()))

    def check_integrity(self) -> None:
        """Asserts that the three views agree and that no two runs touch."""
        runs = list(self)
        assert sorted((run.count, run.first) for run in runs) == self._by_size
        assert {run.first + run.count: run.first for run in runs} == self._first
        assert sum(run.count for run in runs) == self.num_pages
        for run, following in zip(runs, runs[1:], strict=False):
            assert run.first + run.count < following.first, (run, following)

    def _take_head(self, first: int, count: int) -> None:
        length = self._remove(first)
        if length > count:
            self._insert(first + count, length - count)
        self.num_pages -= count

    def _insert(self, first: int, count: int) -> None:
        self._length[first] = count
        self._first[first + count] = first
        insort(self._by_size, (count, first))

    def _remove(self, first: int) -> int:
        count = self._length.pop(first)
        del self._first[first + count]
        del self._by_size[bisect_left(self._by_size, (count, first))]
        return count
