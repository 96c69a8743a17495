"""Which pages of prompts each of several workers or ranks probably has, by their hashes
(`core.hashing`).

Approximate: it remembers what was sent where, and forgets the least recently used beyond a bound.
A wrong guess costs time, never correctness.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class PrefixIndex:
    """At most `max_pages` page hashes for each owner: a worker's epoch, or a rank."""

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._pages: dict[Hashable, OrderedDict[int, None]] = {}

    def num_matched(self, owner: Hashable, prefix_hashes: Sequence[int]) -> int:
        """Leading pages of the prompt that this owner probably has."""
        pages = self._pages.get(owner)
        if not pages:
            return 0
        for index, prefix_hash in enumerate(prefix_hashes):
            if prefix_hash not in pages:
                return index
        return len(prefix_hashes)

    def record(self, owner: Hashable, prefix_hashes: Sequence[int]) -> None:
        """This owner was given a prompt with these pages."""
        pages = self._pages.setdefault(owner, OrderedDict())
        # Backwards, so that a prefix is never forgotten before what hangs on it.
        for prefix_hash in reversed(prefix_hashes[: self._max_pages]):
            pages[prefix_hash] = None
            pages.move_to_end(prefix_hash)
        while len(pages) > self._max_pages:
            pages.popitem(last=False)

    def forget(self, owner: Hashable) -> None:
        """The owner is gone for good; unknown ones are not an error."""
        self._pages.pop(owner, None)
