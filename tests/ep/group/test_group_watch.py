import queue
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq

from ep.group.group import EpGroup
from ep.group.group_watch import EXIT_CODE, GroupWatch
from tests.ep.group.test_mesh import tcp_pair
from tests.ep.thread_ranks import Meeting, on_all_ranks

PATIENCE_SECONDS = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = tcp_pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_lost_peer_ends_the_process(pair: tuple[socket.socket, socket.socket]) -> None:
    """Also when there is something to be read: nothing is."""
    ours, theirs = pair
    reasons: queue.Queue[str] = queue.Queue()
    watch = GroupWatch([ours], grace_seconds=0.0, end=reasons.put)
    theirs.sendall(b"facts")
    theirs.close()
    assert "a rank of the group is lost" in reasons.get(timeout=PATIENCE_SECONDS)
    assert ours.recv(5, socket.MSG_WAITALL) == b"facts"
    watch.close()


def test_a_step_without_end_ends_the_process(pair: tuple[socket.socket, socket.socket]) -> None:
    reasons: queue.Queue[str] = queue.Queue()
    watch = GroupWatch([pair[0]], grace_seconds=0.01, end=reasons.put)
    watch.limit_steps(0.04)
    assert "takes more than 0.05 s" in reasons.get(timeout=PATIENCE_SECONDS)
    watch.close()


def test_closing_within_the_grace_is_no_loss(pair: tuple[socket.socket, socket.socket]) -> None:
    reasons: queue.Queue[str] = queue.Queue()
    watch = GroupWatch([pair[0]], grace_seconds=1000, end=reasons.put)
    pair[1].close()
    watch.close()
    assert reasons.empty()


def test_nobody_waits_while_idle(pair: tuple[socket.socket, socket.socket]) -> None:
    reasons: queue.Queue[str] = queue.Queue()
    watch = GroupWatch([pair[0]], end=reasons.put)
    watch.beat()
    with watch.idle():
        assert watch._began is None
    assert watch._began is not None
    watch.close()
    assert reasons.empty()


def test_a_watched_group_steps_and_idles() -> None:
    def program(group: EpGroup, _: Meeting) -> list[tuple[int, ...]]:
        group.begin_steps()
        facts = group.exchange((group.rank,))
        inbox = zmq.Context.instance().socket(zmq.PAIR)
        inbox.bind(f"inproc://watched-{group.rank}")
        group.idle_wait(inbox, 0.001)
        inbox.close()
        return facts + group.exchange((2,))

    assert on_all_ranks(2, program) == [[(0,), (1,), (2,), (2,)]] * 2


def test_the_process_really_ends() -> None:
    """Where its main thread waits for something that does not come."""
    program = (
        "import socket, threading\n"
        "from ep.group.group_watch import GroupWatch\n"
        "ours, theirs = socket.socketpair()\n"
        "GroupWatch([ours], grace_seconds=0)\n"
        "theirs.close()\n"
        "threading.Event().wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        timeout=PATIENCE_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == EXIT_CODE
    assert "a rank of the group is lost" in done.stderr + done.stdout
