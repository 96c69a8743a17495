"""The mesh over socket pairs, its ranks threads of this process."""

import contextlib
import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from core.errors import Unavailable
from ep.group.collectives import MeshCollectives
from ep.group.group import EpGroup
from ep.group.mesh import DATA, HEADER, ROUND_BYTES, SocketMesh


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        return ours, theirs


def meshes(size: int, timeout_seconds: float = 20.0) -> list[SocketMesh]:
    peers: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            peers[low][high], peers[high][low] = tcp_pair()
    return [SocketMesh(rank, peers[rank], timeout_seconds) for rank in range(size)]


def on_all(size: int, program: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(size) as executor:
        return list(executor.map(program, range(size), timeout=60))


def content(sender: int, receiver: int, call: int, num_bytes: int) -> bytes:
    return random.Random(f"{sender}/{receiver}/{call}").randbytes(num_bytes)


@pytest.mark.parametrize("size", [2, 5])
def test_swaps_of_all_sizes_arrive_whole(size: int) -> None:
    """From nothing to many rounds, each direction of each pair its own size."""
    group = meshes(size)
    sizes = [0, 1, ROUND_BYTES - 1, ROUND_BYTES, ROUND_BYTES + 1, 3_000_000]
    plan = random.Random(size)
    lengths = [[[plan.choice(sizes) for _ in range(size)] for _ in range(size)] for _ in range(6)]

    def program(rank: int) -> None:
        for call, by_sender in enumerate(lengths):
            outgoing = [
                memoryview(content(rank, to, call, n)) for to, n in enumerate(by_sender[rank])
            ]
            incoming = [memoryview(bytearray(by_sender[sender][rank])) for sender in range(size)]
            group[rank].swap(outgoing, incoming)
            for sender, got in enumerate(incoming):
                if sender != rank:
                    assert got == content(sender, rank, call, by_sender[sender][rank])

    on_all(size, program)
    assert not any(mesh.has_news() for mesh in group)
    for mesh in group:
        mesh.close()


def test_wake_is_news_until_the_next_swap() -> None:
    first, second = meshes(2)
    assert not second.has_news()
    first.wake()
    first.wake()
    deadline = time.monotonic() + 30
    while not second.has_news():
        assert time.monotonic() < deadline
    assert second.has_news(), "looking does not take it away"

    def swap(rank: int) -> bytes:
        into = bytearray(1)
        data = [memoryview(bytes([rank]))] * 2
        (first, second)[rank].swap(data, [memoryview(into)] * 2)
        return bytes(into)

    assert on_all(2, swap) == [b"\x01", b"\x00"]
    assert not second.has_news()
    first.close()
    second.close()


def one_byte_swap(mesh: SocketMesh) -> None:
    mesh.swap([memoryview(b"x")] * 2, [memoryview(bytearray(1)) for _ in range(2)])


def test_dead_peer() -> None:
    first, second = meshes(2)
    second.close()
    with pytest.raises(Unavailable, match="rank 1 is lost"):
        first.has_news()
    with pytest.raises(Unavailable, match="rank 1 is lost"):
        one_byte_swap(first)
    first.close()


def test_peer_that_dies_in_mid_frame() -> None:
    ours, theirs = tcp_pair()
    mesh = SocketMesh(0, {1: ours}, 20.0)
    theirs.sendall(HEADER.pack(DATA, 1, 1000) + b"only this")
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(Unavailable, match="connection closed"):
        mesh.swap([memoryview(b"")] * 2, [memoryview(bytearray(1000))] * 2)
    mesh.close()
    theirs.close()


def test_silent_peer_is_given_up() -> None:
    first, second = meshes(2, timeout_seconds=0.2)
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"silent for 0.2 s"):
        one_byte_swap(first)
    assert 0.15 < time.monotonic() - started < 15
    first.close()
    second.close()


def test_a_peer_may_be_silent_until_steps_begin() -> None:
    first, second = (
        EpGroup(
            rank=rank, size=2, mesh=mesh, collectives=MeshCollectives(mesh, rank, 2), store=None,
            silence_seconds=0.2,
        )
        for rank, mesh in enumerate(meshes(2))
    )  # fmt: skip
    with ThreadPoolExecutor(1) as executor:
        began = executor.submit(first.begin_steps)
        time.sleep(0.5)
        second.begin_steps()
        began.result()
    with pytest.raises(Unavailable, match=r"silent for 0.2 s"):
        first.exchange([1])
    first.close()
    second.close()


def test_peer_that_takes_nothing_is_given_up() -> None:
    first, second = meshes(2, timeout_seconds=0.3)
    large = memoryview(bytes(30_000_000))
    with pytest.raises(Unavailable, match="rank 1 is lost"):
        first.swap([large] * 2, [memoryview(b"")] * 2)
    first.close()
    second.close()


@pytest.mark.parametrize(
    "frame",
    [
        HEADER.pack(DATA, 2, 1),  # a step ahead
        HEADER.pack(DATA, 1, 7),  # another length
        HEADER.pack(77, 1, 1),  # no such kind
    ],
)
def test_ranks_out_of_step_are_found_out(frame: bytes) -> None:
    ours, theirs = tcp_pair()
    mesh = SocketMesh(0, {1: ours}, 20.0)
    theirs.sendall(frame + b"x")
    with pytest.raises(Unavailable, match="out of step"):
        one_byte_swap(mesh)
    with contextlib.suppress(Unavailable):
        mesh.has_news()
    mesh.close()
    theirs.close()
