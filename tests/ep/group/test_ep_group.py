"""Groups of real processes: dispatch and combine, idling and waking, and losing a peer."""

from collections.abc import Iterator

import pytest
import torch

from ep.group.group import EpGroup
from tests.ep import rank_programs
from tests.ep.rank_pool import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("size", "backend", "rounds"), [(2, "sockets", 40), (4, "sockets", 40), (2, "gloo", 15)]
)
def test_collective_equals_local_bit_for_bit(
    pool: RankPool, size: int, backend: str, rounds: int
) -> None:
    program = rank_programs.compare_dispatchers
    compared = pool.run(program, size, size, rounds, backend=backend)
    assert all(isinstance(count, int) and count > 50 for count in compared)


def test_large_and_uneven_tensors(pool: RankPool) -> None:
    assert pool.run(rank_programs.large_tensors, 4, 3000) == [True] * 4


@pytest.mark.parametrize(("size", "num_items"), [(2, 1500), (4, 400)])
def test_no_wake_up_is_lost(pool: RankPool, size: int, num_items: int) -> None:
    results = pool.run(rank_programs.idle_and_wake, size, size, num_items)
    assert [done for done, _ in results] == [num_items] * size
    assert len({exchanges for _, exchanges in results}) == 1


@pytest.mark.parametrize("how", ["exchange", "collective", "idle"])
def test_survivors_notice_a_killed_peer(pool: RankPool, how: str) -> None:
    """The pool loses its last process each time: 4, 3, then 2 ranks."""
    size = len(pool.processes)
    pool.start(rank_programs.lose_a_peer, size, how, backend="auto")
    for rank in range(size - 1):
        message, seconds = pool.result(rank, 60)
        assert "is lost" in message
        assert seconds < 15
    dead = pool.processes.pop()
    pool.pipes.pop()
    dead.join(30)
    assert dead.exitcode == -9


def test_group_of_one_needs_no_peers() -> None:
    import zmq

    group = EpGroup.create(
        rank=0, size=1, rendezvous="", device=torch.device("cpu"), timeout_seconds=1
    )
    assert group.exchange([3, -4]) == [(3, -4)]
    assert group.exchange([]) == [()]
    group.wake()
    assert not group.peer_woke()
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as ours,
        context.socket(zmq.PAIR) as theirs,
    ):
        ours.bind("inproc://one")
        theirs.connect("inproc://one")
        group.idle_wait(ours, 0.01)
        theirs.send(b"work")
        group.idle_wait(ours, 30.0)
        assert ours.poll(0)
    group.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2}, "rank 2"),
        ({"rendezvous": "nowhere"}, "host:port"),
        ({"rendezvous": "host:99999"}, "host:port"),
        ({"backend": "mpi"}, "backend"),
    ],
)
def test_bad_arguments(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "rank": 0,
        "size": 2,
        "rendezvous": "127.0.0.1:1",
        "device": torch.device("cpu"),
        "timeout_seconds": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        EpGroup.create(**(arguments | changes))  # type: ignore[arg-type]
