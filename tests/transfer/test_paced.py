"""Transfers that take turns; the transfer beneath lands them when the test says so."""

from collections.abc import Iterator

import pytest
import torch

from core.clock import ManualClock
from tests.transfer.memory import MemoryTransfer
from transfer.api import Copy, State, TransferId
from transfer.paced import QUICK_SECONDS, PacedTransfer

# Of room, and of a transfer: two fit at first.
LEAST_BYTES, MOST_BYTES, NUM_BYTES = 100, 1600, 40


class Sender:
    """Submits transfers "0", "1", ... of NUM_BYTES each; `sinks` are its peers."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.beneath = MemoryTransfer("sender", held=True)
        self.beneath.register(torch.zeros(2 * LEAST_BYTES, dtype=torch.uint8))
        self.sinks = [MemoryTransfer(f"sink {index}") for index in range(2)]
        for sink in self.sinks:
            sink.register(torch.zeros(2 * LEAST_BYTES, dtype=torch.uint8))
        self.paced = PacedTransfer(self.beneath, self.clock)

    def submit(
        self, count: int, sink: int = 0, num_bytes: int = NUM_BYTES, flow: str = ""
    ) -> list[TransferId]:
        peer, copies = self.sinks[sink].describe(), [Copy(0, 0, num_bytes)]
        return [self.paced.submit(peer, copies, b"%d" % index, flow) for index in range(count)]

    def land(self, seconds: float = 0.0) -> list[TransferId]:
        """All that are on their way, after so long; those that are reported."""
        self.clock.advance(seconds)
        self.beneath.deliver()
        completions = self.paced.poll()
        assert all(completion.state is State.DONE for completion in completions)
        return [completion.transfer for completion in completions]


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    monkeypatch.setattr("transfer.paced.LEAST_ROOM_BYTES", LEAST_BYTES)
    monkeypatch.setattr("transfer.paced.MOST_ROOM_BYTES", MOST_BYTES)
    sender = Sender()
    yield sender
    for agent in (sender.beneath, *sender.sinks):
        agent.close()


def test_what_is_beyond_a_slow_peers_room_waits_its_turn(sender: Sender) -> None:
    transfers = sender.submit(5)
    assert sender.paced.poll() == []
    for turn in (transfers[:2], transfers[2:4], transfers[4:]):
        assert sender.beneath.num_in_flight == len(turn)
        assert sender.land(2 * QUICK_SECONDS) == turn
    assert [each.message for each in sender.sinks[0].notifications()] == [
        b"0", b"1", b"2", b"3", b"4",
    ]  # fmt: skip


def test_a_quick_peer_gets_more_at_a_time_until_it_is_slow(sender: Sender) -> None:
    num_most = MOST_BYTES // NUM_BYTES
    sender.submit(4 * num_most)
    nums_landed = [len(sender.land()) for _ in range(4)]
    assert nums_landed[0] == 2
    assert nums_landed == sorted(nums_landed)
    assert nums_landed[-1] == num_most
    assert len(sender.land(2 * QUICK_SECONDS)) == num_most
    assert len(sender.land()) == 2


def test_peers_do_not_wait_for_each_other_nor_large_transfers_for_room(sender: Sender) -> None:
    slow = sender.submit(4, sink=0)
    large = sender.submit(2, sink=1, num_bytes=LEAST_BYTES + 1)
    assert sender.beneath.num_in_flight == 2 + 1
    assert sender.land(1.0) == [*slow[:2], large[0]]
    assert sender.land(1.0) == [*slow[2:], large[1]]


def test_flows_to_a_peer_take_turns(sender: Sender) -> None:
    long, short = sender.submit(6, flow="long"), sender.submit(3, flow="short")
    other = sender.submit(1, flow="other")
    turns = [sender.land(2 * QUICK_SECONDS) for _ in range(5)]
    assert turns[0] == long[:2]
    assert turns[1:] == [
        [long[2], short[0]],
        [other[0], long[3]],
        [short[1], long[4]],
        [short[2], long[5]],
    ]


def test_what_is_withdrawn_never_begins(sender: Sender) -> None:
    long, short = sender.submit(5, flow="long"), sender.submit(2, flow="short")
    assert sender.paced.withdraw("long") == long[2:]
    assert sender.paced.withdraw("long") == sender.paced.withdraw("unheard of") == []
    assert [sender.land(1.0) for _ in range(3)] == [long[:2], short, []]
    assert sender.submit(1, flow="long")
    assert len(sender.land()) == 1


@pytest.mark.parametrize("how", ["dies", "is released"])
def test_of_a_peer_that_is_gone_everything_fails_at_once(sender: Sender, how: str) -> None:
    lost, kept = sender.submit(5, sink=0), sender.submit(3, sink=1)
    if how == "dies":
        sender.sinks[0].kill()
    else:
        sender.paced.release("sink 0")
    completions = sender.paced.poll()
    assert {each.transfer for each in completions} == set(lost)
    assert {each.state for each in completions} == {State.FAILED}
    assert all("sink 0" in each.error for each in completions)
    assert sender.land(1.0) + sender.land(1.0) == kept


def test_a_peer_that_dies_before_a_turn_fails_those_in_line(sender: Sender) -> None:
    transfers = sender.submit(5)
    sender.beneath.deliver()
    sender.sinks[0].kill()
    states = {each.transfer: each.state for each in sender.paced.poll()}
    assert [states[each] for each in transfers] == [State.DONE] * 2 + [State.FAILED] * 3
