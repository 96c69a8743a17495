"""Which pages already hold the KV of which prefix: a tree with one node a full page of tokens.

A node's place in the tree spells all tokens up to its page's end; keys are the tokens
themselves, so that two prefixes never collide. The tree names pages, it does not own memory:
its caller moves pages between the pool's states (`cached` while they are in the tree).

    lease = tree.match(token_ids)         # pages of the longest known prefix, held
    ... compute the rest ...
    taken = tree.extend(lease, token_ids, pages, num_pages)      # now known too, and held
    tree.unlock(lease)
    freed = tree.evict(n)                 # never a page that is held

`token_ids` are packed (`core.token_ids`): the key of a page is its slice of them. Torch-free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from core.token_ids import TOKEN_BYTES


@dataclass(slots=True, eq=False)
class _Node:
    page: int
    key: bytes
    parent: "_Node | None"
    children: dict[bytes, "_Node"] = field(default_factory=dict)
    num_locks: int = 0
    last_used: int = 0  # in ticks of the tree
    alive: bool = True

    @property
    def evictable(self) -> bool:
        return self.alive and not self.num_locks and not self.children


@dataclass(slots=True, eq=False)
class Lease:
    """Pages held for one request, in token order. `unlock` ends it."""

    _nodes: list[_Node]
    _open: bool = True

    @property
    def pages(self) -> list[int]:
        return [node.page for node in self._nodes]

    @property
    def num_pages(self) -> int:
        return len(self._nodes)


@dataclass(slots=True, eq=False)
class Found:
    """The longest known prefix of a prompt as of a version of the tree. Holds nothing."""

    node: _Node
    num_pages: int
    version: int


class PrefixTree:
    """Least recently used leaves go first; a lease uses all pages of its prefix."""

    def __init__(self, page_tokens: int) -> None:
        if page_tokens < 1:
            raise ValueError(f"page_tokens must be at least 1, got {page_tokens}")
        self._page_bytes = TOKEN_BYTES * page_tokens
        self._root = _Node(page=-1, key=b"", parent=None)
        self._num_pages = 0
        self._num_locked = 0
        self._tick = 0
        self._version = 0  # of what is known
        # (last_used, tie, node) of leaves that were evictable when they were pushed. Entries
        # go stale when a node is used again; they are skipped, and swept when too many.
        self._heap: list[tuple[int, int, _Node]] = []
        self._num_pushed = 0

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        """Pages that no lease holds: what `evict` could give at most."""
        return self._num_pages - self._num_locked

    def match(self, token_ids: bytes) -> Lease:
        """Holds the pages of the longest known prefix, at least one token short of the whole:
        the last token's logits have to be computed."""
        nodes: list[_Node] = []
        node: _Node | None = self._root
        for index in range((len(token_ids) - 1) // self._page_bytes):
            assert node is not None
            node = node.children.get(self._key(token_ids, index))
            if node is None:
                break
            nodes.append(node)
        self._lock(nodes)
        return Lease(nodes)

    def find(self, token_ids: bytes, found: Found | None = None) -> Found:
        """What `match` would hold now. Holds nothing and uses nothing.

        `found` is what the same tokens gave before: it is where the search goes on from. A page
        below it may be known by now, or the last ones of it may be evicted.
        """
        if found is None:
            found = Found(self._root, 0, -1)
        if found.version == self._version:
            return found
        node, num_pages = found.node, found.num_pages
        while not node.alive:
            assert node.parent is not None
            node, num_pages = node.parent, num_pages - 1
        for index in range(num_pages, (len(token_ids) - 1) // self._page_bytes):
            child = node.children.get(self._key(token_ids, index))
            if child is None:
                break
            node, num_pages = child, index + 1
        return Found(node, num_pages, self._version)

    def extend(
        self, lease: Lease, token_ids: bytes, pages: Sequence[int], num_pages: int
    ) -> list[int]:
        """Makes the first `num_pages` pages of `token_ids` known and held by `lease`.

        `pages` are the request's own, in token order from its first token. Returns those that
        the tree has taken over; a prefix that is known by now keeps the page it has.
        """
        assert lease._open, "the lease has ended"
        if num_pages * self._page_bytes > len(token_ids) or num_pages > len(pages):
            raise ValueError(f"{num_pages} pages are not all full of these tokens")
        taken: list[int] = []
        node = lease._nodes[-1] if lease._nodes else self._root
        fresh: list[_Node] = []
        for index in range(lease.num_pages, num_pages):
            key = self._key(token_ids, index)
            child = node.children.get(key)
            if child is None:
                child = _Node(page=pages[index], key=key, parent=node)
                node.children[key] = child
                self._num_pages += 1
                self._version += 1
                taken.append(pages[index])
            fresh.append(child)
            node = child
        self._lock(fresh)
        lease._nodes.extend(fresh)
        return taken

    def unlock(self, lease: Lease) -> None:
        """Ends a lease; its pages stay known and may be evicted from now on."""
        assert lease._open, "the lease has ended already"
        lease._open = False
        self._tick += 1
        for node in reversed(lease._nodes):
            node.num_locks -= 1
            assert node.num_locks >= 0
            node.last_used = self._tick
            if not node.num_locks:
                self._num_locked -= 1
                self._offer(node)

    def evict(self, num_pages: int) -> list[int]:
        """Forgets up to `num_pages` pages that no lease holds, least recently used leaves first.

        Returns them; fewer when there are no more.
        """
        freed: list[int] = []
        while len(freed) < num_pages and self._heap:
            last_used, _, node = heappop(self._heap)
            if not node.evictable or node.last_used != last_used:
                continue
            parent = node.parent
            assert parent is not None
            node.alive = False
            del parent.children[node.key]
            self._num_pages -= 1
            self._version += 1
            freed.append(node.page)
            if parent is not self._root:
                self._offer(parent)
        return freed

    def _key(self, token_ids: bytes, index: int) -> bytes:
        begin = index * self._page_bytes
        return token_ids[begin : begin + self._page_bytes]

    def _lock(self, nodes: list[_Node]) -> None:
        for node in nodes:
            self._num_locked += not node.num_locks
            node.num_locks += 1

    def _offer(self, node: _Node) -> None:
        if not node.evictable:
            return
        self._num_pushed += 1
        heappush(self._heap, (node.last_used, self._num_pushed, node))
        if len(self._heap) > 4 * self._num_pages + 64:
            self._heap = [entry for entry in self._heap if self._is_fresh(entry)]
            heapify(self._heap)

    @staticmethod
    def _is_fresh(entry: tuple[int, int, _Node]) -> bool:
        last_used, _, node = entry
        return node.evictable and node.last_used == last_used
