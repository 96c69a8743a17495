"""How the ranks of a group find each other: one TCP connection between any two of them.

Addresses travel through a key-value store that rank 0 serves at the rendezvous address. Each
rank listens, publishes where, connects to the ranks below it and accepts those above it. A
connection opens with a greeting (magic, the group's token, rank); a stranger's is closed.
"""

import secrets
import socket
import struct
import time
from datetime import timedelta

import torch.distributed as dist

from core.errors import Unavailable
from core.keepalive import keep_alive

MAGIC = b"epserve1"
GREETING = struct.Struct("<8s32sI")  # magic, token in hex, rank
STRANGER_SECONDS = 2.0  # how long a connection may take to say who it is


def split_address(rendezvous: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port"; ValueError for anything else."""
    host, separator, port = rendezvous.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"rendezvous must be host:port, got {rendezvous!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def open_store(host: str, port: int, *, rank: int, size: int, timeout: float) -> dist.TCPStore:
    """The group's key-value store, when all ranks have joined it. Unavailable otherwise."""
    try:
        return dist.TCPStore(
            host,
            port,
            world_size=size,
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=True,
        )
    except RuntimeError as error:  # torch's DistError and its kin
        raise Unavailable(f"EP rank {rank} of {size} found no group: {error}") from error


def connect_all(
    store: dist.Store, host: str, *, rank: int, size: int, timeout: float
) -> dict[int, socket.socket]:
    """A connected, blocking socket to every other rank of the group, by rank.

    `host` is the rendezvous host, `timeout` in seconds; Unavailable when not all ranks are
    connected by then.
    """
    deadline = time.monotonic() + timeout
    peers: dict[int, socket.socket] = {}
    try:
        with _listener(host) as listener:
            token = _publish(store, rank, _local_host(host, rank), listener)
            for peer in range(rank):
                peers[peer] = _connect(store, token, rank, peer, deadline)
            while len(peers) < size - 1:
                missing = set(range(rank + 1, size)) - set(peers)
                peer, connection = _accept(listener, token, missing, deadline)
                peers[peer] = connection
    except (OSError, RuntimeError) as error:
        for connection in peers.values():
            connection.close()
        raise Unavailable(
            f"EP rank {rank} reached {len(peers)} of {size - 1} peers: {error}"
        ) from error
    for connection in peers.values():
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
    return peers


def _family(host: str) -> tuple[socket.AddressFamily, str]:
    """Address family and numeric address of a host."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return socket.AddressFamily(found[0]), str(found[4][0])


def _listener(host: str) -> socket.socket:
    """Listens where peers can come from: loopback only, if that is where they meet."""
    family, address = _family(host)
    loopback = address == "::1" or address.startswith("127.")
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address if loopback else "", 0))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _local_host(host: str, rank: int) -> str:
    """The address that peers reach us by: the one we would use to reach the rendezvous."""
    if rank == 0:
        return host
    family, address = _family(host)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing, only picks a route
        return str(probe.getsockname()[0])


def _publish(store: dist.Store, rank: int, host: str, listener: socket.socket) -> bytes:
    """Tells where we listen; returns the token that all greetings of this group carry."""
    if rank == 0:
        store.set("ep/token", secrets.token_hex(16))
    store.set(f"ep/address/{rank}", f"{host} {listener.getsockname()[1]}")
    return bytes(store.get("ep/token"))


def _connect(
    store: dist.Store, token: bytes, rank: int, peer: int, deadline: float
) -> socket.socket:
    host, port = bytes(store.get(f"ep/address/{peer}")).decode().split()
    connection = socket.create_connection((host, int(port)), timeout=_left(deadline))
    try:
        connection.sendall(GREETING.pack(MAGIC, token, rank))
    except OSError:
        connection.close()
        raise
    return connection


def _accept(
    listener: socket.socket, token: bytes, missing: set[int], deadline: float
) -> tuple[int, socket.socket]:
    """The next missing rank that greets with the token; all others are turned away."""
    while True:
        listener.settimeout(_left(deadline))
        connection, _ = listener.accept()
        connection.settimeout(min(STRANGER_SECONDS, _left(deadline)))
        try:
            greeting = connection.recv(GREETING.size, socket.MSG_WAITALL)
        except OSError:
            greeting = b""  # silent or reset: a stranger like any other
        if len(greeting) == GREETING.size:
            magic, its_token, peer = GREETING.unpack(greeting)
            if magic == MAGIC and its_token == token and peer in missing:
                return peer, connection
        connection.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
