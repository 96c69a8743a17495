"""Groups that form, or do not, their ranks threads of this process."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist

from core.errors import Unavailable
from ep.group import rendezvous
from ep.group.group import EpGroup
from tests.free_ports import free_port


def create(rank: int, size: int, port: int, timeout_seconds: float = 20.0) -> EpGroup:
    return EpGroup.create(
        rank=rank,
        size=size,
        rendezvous=f"127.0.0.1:{port}",
        device=torch.device("cpu"),
        timeout_seconds=timeout_seconds,
    )


def test_ranks_find_each_other_in_any_order() -> None:
    port = free_port()
    with ThreadPoolExecutor(4) as executor:
        groups = list(executor.map(lambda rank: create(rank, 4, port), [3, 1, 0, 2]))
        facts = list(executor.map(lambda g: g.exchange([g.rank, -7 * g.rank]), groups))
    assert facts == [[(0, 0), (1, -7), (2, -14), (3, -21)]] * 4
    for group in groups:
        group.close()


def test_missing_rank_is_reported_in_time() -> None:
    with pytest.raises(Unavailable, match="EP rank 0 of 2 found no group"):
        create(0, 2, free_port(), timeout_seconds=1.0)


SECRET = b"the group's"


def open_stores(port: int, size: int) -> list[dist.TCPStore]:
    def open_store(rank: int) -> dist.TCPStore:
        return rendezvous.open_store("127.0.0.1", port, rank=rank, size=size, timeout=20)

    with ThreadPoolExecutor(size) as executor:
        return list(executor.map(open_store, range(size)))


def connect_rank(
    store: dist.Store, rank: int, secret: bytes = SECRET, timeout: float = 20
) -> dict[int, socket.socket]:
    return rendezvous.connect_all(store, "127.0.0.1", secret, rank=rank, size=2, timeout=timeout)


def test_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone connects first to rank 0's listener: silent, talking HTTP, with a wrong proof,
    or as a rank that does not exist."""
    monkeypatch.setattr(rendezvous, "STRANGER_SECONDS", 0.5)
    stores = open_stores(free_port(), 2)
    with ThreadPoolExecutor(2) as executor:
        first = executor.submit(connect_rank, stores[0], 0)
        host, its_port = bytes(stores[1].get("ep/address/0")).decode().split()
        hello = rendezvous.HELLO.pack
        strangers = []
        for greeting in (
            b"",
            b"GET / HTTP/1.1\r\nhost: somewhere.example.com\r\naccept: text/html\r\n\r\n",
            hello(rendezvous.MAGIC, 1, b"r" * 32) + b"0" * 32,
            hello(rendezvous.MAGIC, 2, b"r" * 32),
            hello(rendezvous.MAGIC, 0, b"r" * 32),
        ):
            strangers.append(socket.create_connection((host, int(its_port))))
            strangers[-1].sendall(greeting)
        second = executor.submit(connect_rank, stores[1], 1)
        ours, theirs = first.result(20), second.result(20)
    assert (list(ours), list(theirs)) == ([1], [0])
    ours[1].sendall(b"hi")
    assert theirs[0].recv(2) == b"hi"
    for connection in (ours[1], theirs[0], *strangers):
        connection.close()


def test_ranks_with_another_secret_are_strangers_to_each_other() -> None:
    stores = open_stores(free_port(), 2)
    with ThreadPoolExecutor(2) as executor:
        ours = executor.submit(connect_rank, stores[0], 0, timeout=3)
        theirs = executor.submit(connect_rank, stores[1], 1, b"another", timeout=3)
        with pytest.raises(Unavailable, match="does not know the group's secret"):
            theirs.result()
        with pytest.raises(Unavailable, match="reached 0 of 1 peers"):
            ours.result()


def test_the_store_tells_no_secret_and_listens_where_it_is_told() -> None:
    port = free_port()
    stores = open_stores(port, 2)
    with ThreadPoolExecutor(2) as executor:
        peers = list(executor.map(connect_rank, stores, range(2)))
    for connection in (peers[0][1], peers[1][0]):
        connection.close()
    assert all(SECRET not in bytes(stores[0].get(f"ep/address/{rank}")) for rank in range(2))
    assert not stores[0].check(["ep/token"])
    listening = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
    assert {one.ip for one in listening if one.port == port} == {"127.0.0.1"}


def test_an_address_that_is_not_ours() -> None:
    """192.0.2.0/24 is nobody's."""
    with pytest.raises(Unavailable, match=r"cannot listen on 192\.0\.2\.1"):
        rendezvous.open_store("192.0.2.1", free_port(), rank=0, size=2, timeout=1)


def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        thread_count = threading.active_count()
        with pytest.raises(Unavailable, match="EP rank 0"):
            create(0, 2, holder.getsockname()[1], timeout_seconds=1.0)
        assert threading.active_count() == thread_count


@pytest.mark.parametrize(
    ("address", "expected"),
    [("10.0.0.1:5", ("10.0.0.1", 5)), ("[::1]:65535", ("::1", 65535)), ("a-b.c:1", ("a-b.c", 1))],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert rendezvous.split_address(address) == expected


@pytest.mark.parametrize("address", ["", "host", ":5", "host:", "host:0", "host:-1", "host:x"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        rendezvous.split_address(address)
