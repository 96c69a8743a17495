"""The switches of the in-memory twin; what it shares with NIXL is in test_contract.py."""

from collections.abc import Iterator

import pytest
import torch

from core.errors import TransferError
from tests.transfer.memory import MemoryTransfer
from transfer.api import Completion, Copy, State

WHOLE = [Copy(0, 0, 8)]


@pytest.fixture
def pair() -> Iterator[tuple[MemoryTransfer, MemoryTransfer]]:
    agents = MemoryTransfer("sender", held=True), MemoryTransfer("receiver")
    for value, agent in enumerate(agents):
        agent.register(torch.full((8,), 1 - value, dtype=torch.uint8))
    yield agents
    for agent in agents:
        agent.close()


def content(agent: MemoryTransfer) -> list[int]:
    assert agent._buffer is not None
    return agent._buffer.tolist()


def test_held_transfers_land_one_by_one(pair: tuple[MemoryTransfer, MemoryTransfer]) -> None:
    sender, receiver = pair
    ids = [sender.submit(receiver.describe(), [Copy(i, i, 1)], bytes([i + 1])) for i in range(3)]
    assert (sender.poll(), receiver.notifications(), sum(content(receiver))) == ([], [], 0)
    assert sender.deliver(2) == 2
    assert content(receiver) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert [n.message for n in receiver.notifications()] == [b"\x01", b"\x02"]
    assert [c.transfer for c in sender.poll()] == ids[:2]
    assert sender.num_in_flight == 1
    assert sender.deliver() == 1
    assert sender.poll() == [Completion(transfer=ids[2], state=State.DONE)]


def test_bytes_are_read_at_delivery(pair: tuple[MemoryTransfer, MemoryTransfer]) -> None:
    sender, receiver = pair
    sender.submit(receiver.describe(), WHOLE, b"m")
    assert sender._buffer is not None
    sender._buffer.fill_(9)
    sender.deliver()
    assert content(receiver) == [9] * 8


def test_dropped_transfers_end_only_by_release(
    pair: tuple[MemoryTransfer, MemoryTransfer],
) -> None:
    sender, receiver = pair
    sender.held = False
    sender.drop_next(1)
    lost = sender.submit(receiver.describe(), WHOLE, b"lost")
    kept = sender.submit(receiver.describe(), WHOLE, b"kept")
    sender.deliver()
    assert [c.transfer for c in sender.poll()] == [kept]
    assert [n.message for n in receiver.notifications()] == [b"kept"]
    sender.release("receiver")
    (completion,) = sender.poll()
    assert (completion.transfer, completion.state) == (lost, State.FAILED)


def test_killed_receiver(pair: tuple[MemoryTransfer, MemoryTransfer]) -> None:
    sender, receiver = pair
    transfer = sender.submit(receiver.describe(), WHOLE, b"m")
    receiver.kill()
    assert sender.deliver() == 0
    (completion,) = sender.poll()
    assert (completion.transfer, completion.state) == (transfer, State.FAILED)
    assert content(receiver) == [0] * 8
    with pytest.raises(TransferError, match="no such agent"):
        sender.submit(receiver.describe(), WHOLE, b"m")


def test_a_name_is_used_once_at_a_time(pair: tuple[MemoryTransfer, MemoryTransfer]) -> None:
    with pytest.raises(ValueError, match="exists already"):
        MemoryTransfer("sender")
