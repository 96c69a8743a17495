"""What both backends promise; NIXL's other sides are processes of their own.

"nixl" lets UCX choose (CMA on one machine), "nixl-tcp" allows it TCP only: bytes are then on
their way for a while, and the receiver has to take part.
"""

import hashlib
import itertools
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
import torch

from core.errors import TransferError
from tests.transfer.far_end import Check, FarEnd, MakeFarEnd, MemoryFarEnd, NixlFarEnd
from tests.transfer.memory import MemoryTransfer
from transfer.api import AgentDescriptor, Completion, Copy, State, Transfer, TransferId

NUM_BYTES = 8 << 20
serial = itertools.count()


@dataclass
class Near:
    """Our side: an agent and its buffer of random bytes."""

    backend: str
    transfer: Transfer
    buffer: torch.Tensor
    make_far_end: MakeFarEnd

    def wait(self, *transfers: TransferId, seconds: float = 60.0) -> dict[TransferId, Completion]:
        """Completions of these transfers, and of no others."""
        ended: dict[TransferId, Completion] = {}
        deadline = time.monotonic() + seconds
        while set(ended) != set(transfers):
            assert time.monotonic() < deadline, f"{set(transfers) - set(ended)} are not over"
            for completion in self.transfer.poll():
                assert completion.transfer not in ended
                assert completion.transfer in transfers
                ended[completion.transfer] = completion
        return ended

    def wait_done(self, *transfers: TransferId) -> None:
        assert {c.state for c in self.wait(*transfers).values()} == {State.DONE}


def unique(name: str) -> str:
    return f"{name}-{os.getpid()}-{next(serial)}"


def random_bytes(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module", params=["memory", "nixl", "nixl-tcp"])
def near(request: pytest.FixtureRequest) -> Iterator[Near]:
    made: list[FarEnd] = []

    def make_far_end(name: str) -> FarEnd:
        kind = MemoryFarEnd if request.param == "memory" else NixlFarEnd
        made.append(kind(unique(name), NUM_BYTES))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "nixl-tcp":
            patch.setenv("UCX_TLS", "tcp")
        if request.param == "memory":
            transfer: Transfer = MemoryTransfer(unique("near"))
        else:
            from transfer.nixl_agent import NixlTransfer

            transfer = NixlTransfer(unique("near"))
        buffer = random_bytes(1)
        transfer.register(buffer)
        yield Near(request.param, transfer, buffer, make_far_end)
        transfer.close()
        transfer.close()  # a second time is no error
        for far in made:
            far.kill()


@pytest.fixture(scope="module")
def far(near: Near) -> FarEnd:
    return near.make_far_end("far")


def scattered(rng: random.Random, count: int, longest: int) -> list[Copy]:
    """Copies whose targets do not overlap, in random order."""
    pitch = NUM_BYTES // count
    targets = rng.sample(range(count), count)
    return [
        Copy(
            source_offset=rng.randrange(NUM_BYTES - longest),
            target_offset=slot * pitch + rng.randrange(pitch - min(longest, pitch) + 1),
            num_bytes=rng.randint(1, min(longest, pitch)),
        )
        for slot in targets
    ]


def test_moves_exactly_the_bytes_asked_for(near: Near, far: FarEnd) -> None:
    rng = random.Random(7)
    expected = bytearray(far.read())
    source = near.buffer.numpy().tobytes()
    for _ in range(12):
        copies = scattered(rng, rng.choice([1, 2, 30]), rng.choice([1, 100, 100_000]))
        for copy in copies:
            expected[copy.target_offset : copy.target_offset + copy.num_bytes] = source[
                copy.source_offset : copy.source_offset + copy.num_bytes
            ]
        near.wait_done(near.transfer.submit(far.descriptor, copies, b"landed"))
        assert [n.message for n in far.receive(1)] == [b"landed"]
        assert far.read() == expected


def test_thousands_of_copies_in_one_transfer(near: Near, far: FarEnd) -> None:
    copies = scattered(random.Random(3), 5_000, 700)
    expected = bytearray(far.read())
    source = near.buffer.numpy().tobytes()
    for copy in copies:
        expected[copy.target_offset : copy.target_offset + copy.num_bytes] = source[
            copy.source_offset : copy.source_offset + copy.num_bytes
        ]
    near.wait_done(near.transfer.submit(far.descriptor, copies, b"many"))
    far.receive(1)
    assert far.read() == expected


def test_message_arrives_after_its_bytes(near: Near, far: FarEnd) -> None:
    """The far end looks at the bytes as soon as it has the message; 8 in flight at a time."""
    rng = random.Random(5)
    slot = NUM_BYTES // 8
    for start in range(0, 160, 8):
        transfers = []
        for index in range(start, start + 8):
            num_bytes = rng.choice([1, 5_000, slot])
            source = rng.randrange(NUM_BYTES - num_bytes + 1)
            target = (index % 8) * slot
            data = near.buffer[source : source + num_bytes].numpy().tobytes()
            check = Check(index, target, num_bytes, hashlib.blake2b(data).digest())
            transfers.append(
                near.transfer.submit(
                    far.descriptor,
                    [Copy(source, target, num_bytes)],
                    b"check" + msgspec.msgpack.encode(check),
                )
            )
        near.wait_done(*transfers)
        received = far.receive(8)
        indices = {msgspec.msgpack.decode(n.message[5:], type=Check).index for n in received}
        assert indices == set(range(start, start + 8))
    assert far.bad_checks() == []


@pytest.mark.parametrize("message", [b"\x00", b"\x00\xff" * 700, bytes(range(256)) * 400])
def test_message_is_arbitrary_bytes(near: Near, far: FarEnd, message: bytes) -> None:
    near.wait_done(near.transfer.submit(far.descriptor, [Copy(0, 0, 1)], message))
    (notification,) = far.receive(1)
    assert notification.message == message
    assert notification.sender == near.transfer.describe().name


@pytest.mark.parametrize(
    "copy",
    [
        Copy(0, 0, 0),
        Copy(0, 0, -1),
        Copy(-1, 0, 1),
        Copy(0, -1, 1),
        Copy(NUM_BYTES - 9, 0, 10),
        Copy(0, NUM_BYTES - 9, 10),
    ],
)
def test_ranges_outside_are_refused(near: Near, far: FarEnd, copy: Copy) -> None:
    before = far.read()
    with pytest.raises(ValueError, match="byte"):
        near.transfer.submit(far.descriptor, [Copy(0, 0, 64), copy], b"never")
    assert near.transfer.poll() == []
    assert far.read() == before


@pytest.mark.parametrize(("copies", "message"), [([], b"m"), ([Copy(0, 0, 1)], b"")])
def test_empty_transfers_are_refused(
    near: Near, far: FarEnd, copies: list[Copy], message: bytes
) -> None:
    with pytest.raises(ValueError, match="at least one copy and a message"):
        near.transfer.submit(far.descriptor, copies, message)


def test_descriptor_survives_the_wire(near: Near, far: FarEnd) -> None:
    wire = msgspec.msgpack.encode(far.descriptor)
    again = msgspec.msgpack.decode(wire, type=AgentDescriptor)
    near.wait_done(near.transfer.submit(again, [Copy(0, 0, 10)], b"again"))
    assert [n.message for n in far.receive(1)] == [b"again"]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "nobody", "metadata": b"garbage"},
        {"name": "nobody", "metadata": b""},
        {"name": "nobody"},  # the metadata of another
        {"name": "nobody", "backend": "carrier pigeon"},
    ],
)
def test_bad_descriptor_is_refused_and_harms_no_one(
    near: Near, far: FarEnd, changes: dict[str, object]
) -> None:
    bad = msgspec.structs.replace(far.descriptor, **changes)
    with pytest.raises(TransferError):
        near.transfer.submit(bad, [Copy(0, 0, 1)], b"never")
    near.wait_done(near.transfer.submit(far.descriptor, [Copy(0, 0, 1)], b"fine"))
    assert [n.message for n in far.receive(1)] == [b"fine"]


def test_killed_peer_fails_its_transfers_and_no_others(near: Near, far: FarEnd) -> None:
    victim = near.make_far_end("victim")
    near.wait_done(near.transfer.submit(victim.descriptor, [Copy(0, 0, 9)], b"warm"))
    if isinstance(victim, NixlFarEnd):
        victim.pause()  # so that what follows is in flight when it dies
    elif isinstance(near.transfer, MemoryTransfer):
        near.transfer.held = True
    whole = [Copy(0, 0, NUM_BYTES)]
    doomed = [near.transfer.submit(victim.descriptor, whole, b"x") for _ in range(3)]
    assert near.transfer.poll() == []
    victim.kill()
    if isinstance(near.transfer, MemoryTransfer):
        near.transfer.held = False
    ended = near.wait(*doomed)
    assert {c.state for c in ended.values()} == {State.FAILED}
    assert all(victim.descriptor.name in c.error for c in ended.values())
    near.wait_done(near.transfer.submit(far.descriptor, [Copy(0, 0, 1)], b"alive"))
    assert [n.message for n in far.receive(1)] == [b"alive"]

    # It is back under a new name; the old one stays dead.
    heir = near.make_far_end("heir")
    with pytest.raises(TransferError, match=victim.descriptor.name):
        near.wait(near.transfer.submit(victim.descriptor, whole, b"x"))
    near.wait_done(near.transfer.submit(heir.descriptor, whole, b"hello"))
    assert [n.message for n in heir.receive(1)] == [b"hello"]
    assert heir.read() == near.buffer.numpy().tobytes()
    heir.kill()  # while idle: found out at the next attempt
    with pytest.raises(TransferError, match=heir.descriptor.name):
        near.transfer.submit(heir.descriptor, whole, b"late")
    assert near.transfer.poll() == []


def test_released_peer_fails_what_is_in_flight(near: Near, far: FarEnd) -> None:
    if isinstance(near.transfer, MemoryTransfer):
        near.transfer.held = True
    else:
        assert isinstance(far, NixlFarEnd)
        far.pause()
    started = time.monotonic()
    transfer = near.transfer.submit(far.descriptor, [Copy(0, 0, NUM_BYTES)], b"released")
    assert near.transfer.poll() == []
    near.transfer.release(far.descriptor.name)
    near.transfer.release("a peer that never was")
    (completion,) = near.wait(transfer).values()
    assert completion.state is State.FAILED
    assert time.monotonic() - started < 60
    if isinstance(near.transfer, MemoryTransfer):
        near.transfer.held = False
    far.read()  # ends the pause
    # The same peer may be used again.
    near.wait_done(near.transfer.submit(far.descriptor, [Copy(0, 0, 1)], b"anew"))
    assert far.receive(1)[0].message in (b"anew", b"released")


def test_only_whole_buffers_can_be_registered() -> None:
    transfer = MemoryTransfer(unique("other"))
    with pytest.raises(ValueError, match="contiguous"):
        transfer.register(torch.zeros(4, 4)[:, 1:])
    with pytest.raises(ValueError, match="not empty"):
        transfer.register(torch.zeros(0))
    transfer.register(torch.zeros(3, 5, dtype=torch.bfloat16))
    assert transfer.describe().num_bytes == 30
    transfer.close()
