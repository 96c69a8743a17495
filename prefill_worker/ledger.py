"""Which pages each attempt holds: its lease on known prefixes, and pages of its own.

    hold -> reserve -> learn ... -> close

`token_ids` are packed (`core.token_ids`). Torch-free.
"""

from dataclasses import dataclass

from core.token_ids import num_ids
from engine.kv.pages import PagePool
from engine.kv.prefix_tree import Found, Lease, PrefixTree
from engine.link.messages import RankStats


@dataclass(slots=True)
class _Holding:
    token_ids: bytes
    lease: Lease
    pages: list[int]  # in token order; the lease's first


class Ledger:
    """Owner names in the pool are attempt ids. `close` is right at any point of the life of an
    attempt: what it computed so far stays known, the rest of its pages becomes free."""

    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        self._pool = pool
        self._tree = PrefixTree(page_tokens)
        self._page_tokens = page_tokens
        self._holdings: dict[str, _Holding] = {}
        self._found: dict[str, Found] = {}  # of attempts that wait

    @property
    def num_available(self) -> int:
        """Pages that `reserve` can hand out: free ones, and known ones that no attempt holds."""
        return self._pool.num_free + self._tree.num_evictable

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_tokens)

    def num_known_tokens(self, attempt_id: str, token_ids: bytes) -> int:
        """Tokens of the prefix that would not have to be computed, of an attempt that waits. It is
        asked about in every turn, so what was found is kept until the attempt begins or ends."""
        found = self._tree.find(token_ids, self._found.get(attempt_id))
        self._found[attempt_id] = found
        return found.num_pages * self._page_tokens

    def hold(self, attempt_id: str, token_ids: bytes, *, reuse: bool = True) -> int:
        """Takes a lease on the longest known prefix; how many tokens that are. Without `reuse`
        everything is to be computed anew, and nothing is leased."""
        assert attempt_id not in self._holdings, attempt_id
        self._found.pop(attempt_id, None)
        lease = self._tree.match(token_ids if reuse else b"")
        self._holdings[attempt_id] = _Holding(token_ids, lease, lease.pages)
        return lease.num_pages * self._page_tokens

    def reserve(self, attempt_id: str) -> list[int]:
        """All pages of the attempt in token order, taken from the pool as far as they are not
        leased; forgets least recently used prefixes when the pool is short."""
        holding = self._holdings[attempt_id]
        num_own = self.num_pages(num_ids(holding.token_ids)) - holding.lease.num_pages
        short = num_own - self._pool.num_free
        if short > 0:
            self._pool.uncache(self._tree.evict(short))
        self._pool.allocate(attempt_id, num_own)
        holding.pages += self._pool.pages(attempt_id)
        return holding.pages

    def pages(self, attempt_id: str) -> list[int]:
        return self._holdings[attempt_id].pages

    def learn(self, attempt_id: str, num_tokens: int) -> None:
        """The KV of the first `num_tokens` is in the attempt's pages: others may use it."""
        holding = self._holdings[attempt_id]
        num_full = num_tokens // self._page_tokens
        taken = self._tree.extend(holding.lease, holding.token_ids, holding.pages, num_full)
        self._pool.cache(attempt_id, taken)

    def close(self, attempt_id: str) -> None:
        """Gives everything back; does nothing for an attempt that holds nothing."""
        self._found.pop(attempt_id, None)
        holding = self._holdings.pop(attempt_id, None)
        if holding is not None:
            self._tree.unlock(holding.lease)
            self._pool.free(attempt_id)

    def page_stats(self) -> RankStats:
        """The page counts of a `RankStats`: what is known but not held counts as free as
        well as cached; what attempts hold, known or not, as owned."""
        counts = self._pool.counts()
        return RankStats(
            pages_total=counts.total,
            pages_free=self.num_available,
            pages_owned=counts.total - self.num_available,
            pages_cached=self._tree.num_evictable,
        )

    def check_integrity(self) -> None:
        """Asserts that the pool and the tree agree, for tests."""
        self._pool.check_integrity()
        counts = self._pool.counts()
        assert counts.cached == self._tree.num_pages, (counts, self._tree.num_pages)
        assert counts.quarantined == 0
        if not self._holdings:
            assert counts.owned == 0
            assert self._tree.num_evictable == self._tree.num_pages
