"""What is particular to NIXL."""

import os
import signal
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

from tests.transfer.far_end import NixlFarEnd
from transfer.api import Copy, State
from transfer.nixl_agent import NixlTransfer
from transfer.nixl_library import UCX_DEFAULTS

NUM_BYTES = 16 << 20


@pytest.fixture(scope="module")
def agent() -> Iterator[NixlTransfer]:
    with pytest.MonkeyPatch.context() as patch:
        for key in UCX_DEFAULTS:
            patch.delenv(key, raising=False)
        patch.setenv("UCX_TCP_KEEPCNT", "7")
        agent = NixlTransfer(f"agent-{os.getpid()}")
        assert os.environ["UCX_TCP_CONN_NB"] == "y"
        assert os.environ["UCX_TCP_KEEPCNT"] == "7", "the user's setting wins"
    agent.register(torch.full((NUM_BYTES,), 5, dtype=torch.uint8))
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def far() -> Iterator[NixlFarEnd]:
    far = NixlFarEnd(f"nixl-far-{os.getpid()}", NUM_BYTES)
    yield far
    far.kill()


def test_idle_agent_uses_no_cpu(agent: NixlTransfer) -> None:
    def used() -> float:
        before = time.process_time()
        time.sleep(0.4)
        return time.process_time() - before

    # Once is enough: what else lives in this process may have something to do now and then.
    assert any(used() < 0.04 for _ in range(5))


def test_connections_that_strangers_leave_are_given_back(agent: NixlTransfer) -> None:
    """Also by an agent that has nothing to do."""
    process = psutil.Process()
    addresses = [
        tuple(connection.laddr)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert addresses
    before = process.num_fds()
    for address in addresses * 20:
        socket.create_connection(address).close()
    deadline = time.monotonic() + 30
    while process.num_fds() > before and time.monotonic() < deadline:
        agent.poll()
        time.sleep(0.01)
    assert process.num_fds() <= before


def test_polls_with_nothing_to_do_are_cheap(agent: NixlTransfer) -> None:
    def used() -> float:
        before = time.process_time()
        for _ in range(1000):
            agent.poll()
            agent.notifications()
        return time.process_time() - before

    assert any(used() < 0.05 for _ in range(5))


def test_stopped_peer_blocks_nobody(agent: NixlTransfer, far: NixlFarEnd) -> None:
    """A peer that does not run holds up its own transfers and no call of ours."""
    os.kill(far.process.pid or 0, signal.SIGSTOP)
    started = time.monotonic()
    transfers = [agent.submit(far.descriptor, [Copy(0, 0, NUM_BYTES)], b"later") for _ in range(4)]
    while time.monotonic() - started < 0.3:
        assert agent.poll() == []
    assert time.monotonic() - started < 20  # a call that waited would wait for ever
    os.kill(far.process.pid or 0, signal.SIGCONT)
    ended = []
    while len(ended) < len(transfers):
        assert time.monotonic() - started < 60
        ended += agent.poll()
    assert {c.state for c in ended} == {State.DONE}
    assert [n.message for n in far.receive(4)] == [b"later"] * 4
    assert set(far.read()) == {5}


def test_closing_with_transfers_in_flight(far: NixlFarEnd) -> None:
    agent = NixlTransfer(f"hasty-{os.getpid()}")
    agent.register(torch.zeros(NUM_BYTES, dtype=torch.uint8))
    far.pause()
    agent.submit(far.descriptor, [Copy(0, 0, NUM_BYTES)], b"hasty")
    started = time.monotonic()
    agent.close()
    assert time.monotonic() - started < 20
    far.read()


def test_a_second_buffer_is_refused(agent: NixlTransfer) -> None:
    with pytest.raises(AssertionError, match="one buffer"):
        agent.register(torch.zeros(4))
