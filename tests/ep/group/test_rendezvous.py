"""Groups that form, or do not, their ranks threads of this process."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

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


def test_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone connects first to rank 0's listener: silent, talking HTTP, with a wrong token,
    or as a rank that does not exist."""
    monkeypatch.setattr(rendezvous, "STRANGER_SECONDS", 0.5)
    port = free_port()
    stores: dict[int, dist.TCPStore] = {}

    def open_store(rank: int) -> None:
        stores[rank] = rendezvous.open_store("127.0.0.1", port, rank=rank, size=2, timeout=20)

    with ThreadPoolExecutor(2) as executor:
        list(executor.map(open_store, range(2)))

    def connect(rank: int) -> dict[int, socket.socket]:
        return rendezvous.connect_all(stores[rank], "127.0.0.1", rank=rank, size=2, timeout=20)

    with ThreadPoolExecutor(2) as executor:
        first = executor.submit(connect, 0)
        host, its_port = bytes(stores[1].get("ep/address/0")).decode().split()
        token = bytes(stores[1].get("ep/token"))
        pack = rendezvous.GREETING.pack
        strangers = []
        for greeting in (
            b"",
            b"GET / HTTP/1.1\r\nhost: somewhere.example.com\r\naccept: text/html\r\n\r\n",
            pack(rendezvous.MAGIC, b"0" * 32, 1),
            pack(rendezvous.MAGIC, token, 2),
            pack(rendezvous.MAGIC, token, 0),
        ):
            strangers.append(socket.create_connection((host, int(its_port))))
            strangers[-1].sendall(greeting)
        second = executor.submit(connect, 1)
        ours, theirs = first.result(20), second.result(20)
    assert (list(ours), list(theirs)) == ([1], [0])
    ours[1].sendall(b"hi")
    assert theirs[0].recv(2) == b"hi"
    for connection in (ours[1], theirs[0], *strangers):
        connection.close()


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
