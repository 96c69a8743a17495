"""Which rank of a worker prefills a request. Torch-free.

cost(rank) = tokens handed out to it and not computed yet + tokens of this prompt that it
would have to compute; the least wins, the lower rank among equals. What a rank has computed
is guessed from the prompt's hashes, as the gateway made them.
"""

from core.hashing import HASH_BYTES, unpack_hashes
from core.prefix_index import PrefixIndex


class RankChoice:
    """`open_tokens` counts what `choose` has handed out and `done` has not taken back."""

    def __init__(self, num_ranks: int, page_tokens: int, max_pages: int = 100_000) -> None:
        """`max_pages` are remembered of each rank."""
        self.open_tokens = [0] * num_ranks
        self._page_tokens = page_tokens
        self._index = PrefixIndex(max_pages)

    def choose(self, num_tokens: int, prefix_hashes: bytes) -> int:
        """The rank; counts its tokens as open. Only whole hashes of whole pages are looked at."""
        rank = 0
        if len(self.open_tokens) > 1:
            num_hashes = min(num_tokens // self._page_tokens, len(prefix_hashes) // HASH_BYTES)
            hashes = unpack_hashes(prefix_hashes[: num_hashes * HASH_BYTES])
            costs = [
                num_open + num_tokens - self._index.num_matched(rank, hashes) * self._page_tokens
                for rank, num_open in enumerate(self.open_tokens)
            ]
            rank = costs.index(min(costs))
            self._index.record(rank, hashes)
        self.open_tokens[rank] += num_tokens
        return rank

    def done(self, rank: int, num_tokens: int) -> None:
        """A request of so many tokens is over."""
        self.open_tokens[rank] -= num_tokens
