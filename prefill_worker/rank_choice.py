"""Which rank of a worker prefills a request. Torch-free.

cost(rank) = tokens handed out to it and not computed yet + tokens of this prompt that it
would have to compute; the least wins, the lower rank among equals. What a rank has computed
is remembered by the prompt's hashes (`core.hashing`), as the gateway made them, bounded, least
recently used first to go: a guess, as the rank may have forgotten those pages.
"""

from collections import OrderedDict
from collections.abc import Sequence

from core.hashing import HASH_BYTES, unpack_hashes


class RankChoice:
    """`open_tokens` counts what `choose` has handed out and `done` has not taken back."""

    def __init__(self, num_ranks: int, page_tokens: int, max_prefixes: int = 100_000) -> None:
        self.open_tokens = [0] * num_ranks
        self._page_tokens = page_tokens
        self._max_prefixes = max_prefixes
        # (rank, hash) of prefixes computed, oldest use first
        self._known: OrderedDict[tuple[int, int], None] = OrderedDict()

    def choose(self, num_tokens: int, prefix_hashes: bytes) -> int:
        """The rank; counts its tokens as open. Only whole hashes of whole pages are looked at."""
        rank = 0
        if len(self.open_tokens) > 1:
            num_hashes = min(num_tokens // self._page_tokens, len(prefix_hashes) // HASH_BYTES)
            hashes = unpack_hashes(prefix_hashes[: num_hashes * HASH_BYTES])
            costs = [
                num_open + num_tokens - self._num_known(rank, hashes) * self._page_tokens
                for rank, num_open in enumerate(self.open_tokens)
            ]
            rank = costs.index(min(costs))
            self._remember(rank, hashes)
        self.open_tokens[rank] += num_tokens
        return rank

    def done(self, rank: int, num_tokens: int) -> None:
        """A request of so many tokens is over."""
        self.open_tokens[rank] -= num_tokens

    def _num_known(self, rank: int, hashes: Sequence[int]) -> int:
        for index, prefix in enumerate(hashes):
            if (rank, prefix) not in self._known:
                return index
        return len(hashes)

    def _remember(self, rank: int, hashes: Sequence[int]) -> None:
        # Longest first, so that a prefix never outlives its own beginning.
        for prefix in reversed(hashes):
            self._known[rank, prefix] = None
            self._known.move_to_end((rank, prefix))
        while len(self._known) > self._max_prefixes:
            self._known.popitem(last=False)
