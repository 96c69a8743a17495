"""How the ranks of a group find each other: one TCP connection between any two of them.

Addresses travel through a key-value store that rank 0 serves at the rendezvous address, and
nowhere else. Each rank listens at the address that its peers reach it by, publishes it, connects to
the ranks below it and accepts those above it. Whoever reaches the store can read and change what is
in it: both ends of a connection prove to each other that they know the group's secret, which is not
in there. A stranger's connection is closed.

    connecting rank -> HELLO   magic, its rank, 32 random bytes
    accepting rank  -> CHALLENGE   32 random bytes, HMAC(secret, "accept", its rank, both random)
    connecting rank -> HMAC(secret, "connect", its rank, both random)
"""

import hmac
import secrets
import socket
import struct
import time
from datetime import timedelta

import torch.distributed as dist

from core.errors import Unavailable
from core.keepalive import keep_alive

MAGIC = b"epserve2"
HELLO = struct.Struct("<8sI32s")  # magic, rank, random
CHALLENGE = struct.Struct("<32s32s")  # random, proof
PROOF_BYTES = 32
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
            # By itself the store would listen on all addresses; it closes the socket.
            master_listen_fd=_listener(host, port).detach() if rank == 0 else None,
        )
    except (OSError, RuntimeError) as error:  # torch's DistError and its kin
        raise Unavailable(f"EP rank {rank} of {size} found no group: {error}") from error


def connect_all(
    store: dist.Store, host: str, secret: bytes, *, rank: int, size: int, timeout: float
) -> dict[int, socket.socket]:
    """A connected, blocking socket to every other rank of the group, by rank.

    `host` is the rendezvous host, `secret` the group's, `timeout` in seconds; Unavailable when not
    all ranks are connected by then.
    """
    deadline = time.monotonic() + timeout
    peers: dict[int, socket.socket] = {}
    try:
        own_host = _local_host(host, rank)
        with _listener(own_host, 0) as listener:
            store.set(f"ep/address/{rank}", f"{own_host} {listener.getsockname()[1]}")
            for peer in range(rank):
                peers[peer] = _connect(store, secret, rank, peer, deadline)
            while len(peers) < size - 1:
                missing = set(range(rank + 1, size)) - set(peers)
                peer, connection = _accept(listener, secret, rank, missing, deadline)
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


def _listener(host: str, port: int) -> socket.socket:
    """Listens at this address of ours; port 0: a free one."""
    family, address = _family(host)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:  # kept for us by a socket that does the same
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _local_host(host: str, rank: int) -> str:
    """The address that peers reach us by: the one we would use to reach the rendezvous."""
    if rank == 0:
        return host
    family, address = _family(host)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing, only picks a route
        return str(probe.getsockname()[0])


def _proof(secret: bytes, end: bytes, rank: int, hello: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, end + struct.pack("<I", rank) + hello + challenge, "sha256")


def _connect(
    store: dist.Store, secret: bytes, rank: int, peer: int, deadline: float
) -> socket.socket:
    """Raises OSError for one that does not know the secret."""
    host, port = bytes(store.get(f"ep/address/{peer}")).decode().split()
    connection = socket.create_connection((host, int(port)), timeout=_left(deadline))
    try:
        hello = secrets.token_bytes(32)
        connection.sendall(HELLO.pack(MAGIC, rank, hello))
        # The peer may still be connecting to others itself.
        answer = _receive(connection, CHALLENGE.size, deadline)
        challenge, proof = CHALLENGE.unpack(answer)
        if not hmac.compare_digest(proof, _proof(secret, b"accept", peer, hello, challenge)):
            raise OSError(f"rank {peer} at {host}:{port} does not know the group's secret")
        connection.sendall(_proof(secret, b"connect", rank, hello, challenge))
    except OSError:
        connection.close()
        raise
    return connection


def _accept(
    listener: socket.socket, secret: bytes, rank: int, missing: set[int], deadline: float
) -> tuple[int, socket.socket]:
    """The next missing rank that knows the secret; all others are turned away."""
    while True:
        listener.settimeout(_left(deadline))
        connection, _ = listener.accept()
        try:
            until = min(time.monotonic() + STRANGER_SECONDS, deadline)
            peer = _greet(connection, secret, rank, missing, until)
        except OSError:
            peer = None  # silent or reset: a stranger like any other
        if peer is not None:
            return peer, connection
        connection.close()


def _greet(
    connection: socket.socket, secret: bytes, rank: int, missing: set[int], deadline: float
) -> int | None:
    """The rank at the other end; None for a stranger."""
    magic, peer, hello = HELLO.unpack(_receive(connection, HELLO.size, deadline))
    if magic != MAGIC or peer not in missing:
        return None
    challenge = secrets.token_bytes(32)
    own = _proof(secret, b"accept", rank, hello, challenge)
    connection.sendall(CHALLENGE.pack(challenge, own))
    proof = _receive(connection, PROOF_BYTES, deadline)
    its_own = _proof(secret, b"connect", peer, hello, challenge)
    return peer if hmac.compare_digest(proof, its_own) else None


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Exactly so many; OSError when they do not come in time."""
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(_left(deadline))
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionError("connection closed")
        data += piece
    return data


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
