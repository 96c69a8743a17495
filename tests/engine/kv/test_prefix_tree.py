"""The prefix tree against a naive model: a dict from prefix to page."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.token_ids import pack_ids
from engine.kv.prefix_tree import Found, Lease, PrefixTree

PAGE = 2  # tokens a page: small, so that prefixes meet
Prefix = tuple[int, ...]


def prefixes_of(tokens: list[int], num_pages: int) -> list[Prefix]:
    return [tuple(tokens[: (index + 1) * PAGE]) for index in range(num_pages)]


class TreeMachine(RuleBasedStateMachine):
    """Known prefixes with page, locks and the time of last use. Evicting is checked rule by
    rule: only unlocked leaves may go, least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(PAGE)
        self.page_of: dict[Prefix, int] = {}
        self.locks: dict[Prefix, int] = {}
        self.used_at: dict[Prefix, int] = {}
        self.leases: list[tuple[Lease, list[int], list[int]]] = []  # lease, tokens, own pages
        self.found: dict[Prefix, Found] = {}  # what waiting prompts were told last
        self.next_page = 0
        self.time = 0

    tokens = st.lists(st.integers(0, 2), max_size=11)

    def known(self, tokens: list[int]) -> list[Prefix]:
        found = []
        for prefix in prefixes_of(tokens, max(len(tokens) - 1, 0) // PAGE):
            if prefix not in self.page_of:
                break
            found.append(prefix)
        return found

    @rule(tokens=tokens)
    def wait(self, tokens: list[int]) -> None:
        """A prompt begins to wait."""
        self.found[tuple(tokens)] = self.tree.find(pack_ids(tokens))

    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """Some of those that wait, after any number of changes: as if asked for the first time."""
        for tokens in self.found:
            if data.draw(st.booleans()):
                found = self.tree.find(pack_ids(tokens), self.found[tokens])
                assert found.num_pages == len(self.known(list(tokens)))
                self.found[tokens] = found

    @rule(tokens=tokens)
    def match(self, tokens: list[int]) -> None:
        expected = self.known(tokens)
        lease = self.tree.match(pack_ids(tokens))
        assert lease.pages == [self.page_of[prefix] for prefix in expected]
        assert lease.num_pages * PAGE < max(len(tokens), 1)
        for prefix in expected:
            self.locks[prefix] += 1
        num_all = -(-len(tokens) // PAGE)
        fresh = list(range(self.next_page, self.next_page + num_all - lease.num_pages))
        self.next_page += len(fresh)
        self.leases.append((lease, tokens, lease.pages + fresh))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        lease, tokens, pages = data.draw(st.sampled_from(self.leases))
        num_pages = data.draw(st.integers(0, len(tokens) // PAGE))
        before = lease.num_pages
        expected = []
        for index, prefix in enumerate(prefixes_of(tokens, num_pages)):
            if index < before:
                continue
            if prefix not in self.page_of:
                self.page_of[prefix] = pages[index]
                self.locks[prefix] = 0
                self.used_at[prefix] = 0
                expected.append(pages[index])
            self.locks[prefix] += 1
        assert self.tree.extend(lease, pack_ids(tokens), pages, num_pages) == expected
        assert lease.num_pages == max(before, num_pages)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.leases) - 1))
        lease, tokens, _ = self.leases.pop(index)
        self.time += 1
        for prefix in prefixes_of(tokens, lease.num_pages):
            self.locks[prefix] -= 1
            self.used_at[prefix] = self.time
        self.tree.unlock(lease)

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        freed = self.tree.evict(count)
        assert len(freed) == min(count, sum(not locks for locks in self.locks.values()))
        prefix_of = {page: prefix for prefix, page in self.page_of.items()}
        for page in freed:
            candidates = [
                prefix
                for prefix, locks in self.locks.items()
                if not locks and not any(p[:-PAGE] == prefix for p in self.page_of)
            ]
            victim = prefix_of[page]
            assert victim in candidates
            assert self.used_at[victim] == min(self.used_at[p] for p in candidates)
            del self.page_of[victim], self.locks[victim], self.used_at[victim]

    @invariant()
    def counts_agree(self) -> None:
        assert self.tree.num_pages == len(self.page_of)
        assert self.tree.num_evictable == sum(not locks for locks in self.locks.values())
        assert len(set(self.page_of.values())) == len(self.page_of)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_whole_prompt_is_never_matched() -> None:
    tree = PrefixTree(4)
    tokens = list(range(8))
    lease = tree.match(pack_ids(tokens))
    assert tree.extend(lease, pack_ids(tokens), [7, 9], 2) == [7, 9]
    assert tree.match(pack_ids(tokens)).pages == [7]
    assert tree.match(pack_ids([*tokens, 1])).pages == [7, 9]
    assert tree.match(pack_ids(tokens[:4])).pages == []
    assert tree.match(pack_ids([])).pages == []


def test_pages_that_are_not_full_are_refused() -> None:
    tree = PrefixTree(4)
    lease = tree.match(pack_ids([1] * 7))
    with pytest.raises(ValueError, match="not all full"):
        tree.extend(lease, pack_ids([1] * 7), [0, 1], 2)


def test_large_token_ids_do_not_collide() -> None:
    tree = PrefixTree(1)
    lease = tree.match(pack_ids([2**32 - 1, 0]))
    tree.extend(lease, pack_ids([2**32 - 1, 0]), [3, 4], 2)
    assert tree.match(pack_ids([2**32 - 1, 0, 5])).pages == [3, 4]
    assert tree.match(pack_ids([2**31 - 1, 0, 5])).pages == []


def test_stale_heap_entries_are_swept() -> None:
    """A prefix that is used over and over must not make the tree grow."""
    tree = PrefixTree(1)
    lease = tree.match(pack_ids([5, 6, 7]))
    tree.extend(lease, pack_ids([5, 6, 7]), [0, 1, 2], 3)
    tree.unlock(lease)
    for _ in range(1000):
        tree.unlock(tree.match(pack_ids([5, 6, 7, 8])))
    assert len(tree._heap) < 100
    assert tree.evict(10) == [2, 1, 0]
    assert tree.num_pages == 0
