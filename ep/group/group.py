"""The ranks that share the experts of a model, and how they keep step.

A step begins with `exchange`: every rank tells its facts to all, so that all can compute the
same plan. After an exchange in which no rank had work all wait in `idle_wait`, without
using the CPU. The first rank that gets work begins the next exchange; what it sends is what
wakes the others, so that no wake-up can be lost or come too late:

    facts = group.exchange([num_tokens, ...])
    while no rank has work:
        group.idle_wait(socket, timeout)         # own message, a peer's exchange, or timeout
        take in own messages
        if own work or group.peer_woke():
            group.wake(); facts = group.exchange(...)
"""

import math
import os
import socket
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import zmq
from torch.distributed.distributed_c10d import _set_pg_timeout

from core.errors import Unavailable
from ep.group.collectives import Collectives, MeshCollectives, TorchCollectives
from ep.group.group_watch import GroupWatch
from ep.group.mesh import SocketMesh
from ep.group.rendezvous import connect_all, open_store, split_address

BACKENDS = ("auto", "sockets", "gloo", "nccl")
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


class EpGroup:
    """One rank's membership; use from one thread. Unavailable means that a peer is lost and
    the group with it: the process can only end."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        mesh: SocketMesh,
        collectives: Collectives,
        store: dist.Store | None,
        host: str = "",
        secret: bytes = b"",
        silence_seconds: float | None = None,
        watch: GroupWatch | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.collectives = collectives
        self._mesh = mesh
        self._store = store  # rank 0's end serves it: it lives as long as the group
        self._host = host
        self._secret = secret
        self._silence_seconds = silence_seconds
        self._watch = watch

    @classmethod
    def create(
        cls,
        *,
        rank: int,
        size: int,
        rendezvous: str,
        device: torch.device,
        timeout_seconds: float,
        silence_seconds: float | None = None,
        backend: str = "auto",
        secret: bytes = b"",
    ) -> "EpGroup":
        """Waits until all `size` ranks are there; one group a process, which ends when a peer is
        lost and it does not notice that by itself (`GroupWatch`).

        `rendezvous` is "host:port" of rank 0, which all reach and which it listens on; a group of
        one does not use it. `secret` is what tells its ranks from strangers.
        `timeout_seconds` bounds the forming, and how long a peer may keep the others waiting until
        `begin_steps`; `silence_seconds` (default: the same) bounds it afterwards. `backend`
        "auto" is NCCL for a CUDA device and sockets for the CPU. ValueError for bad arguments, else
        Unavailable.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not in 0 .. {size - 1}")
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
        if size == 1:
            mesh = SocketMesh(0, {}, timeout_seconds)
            alone = MeshCollectives(mesh, 0, 1)
            return cls(rank=0, size=1, mesh=mesh, collectives=alone, store=None)
        host, port = split_address(rendezvous)
        store = open_store(host, port, rank=rank, size=size, timeout=timeout_seconds)
        peers = connect_all(store, host, secret, rank=rank, size=size, timeout=timeout_seconds)
        mesh = SocketMesh(rank, peers, timeout_seconds)
        watch = GroupWatch(mesh.sockets)
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "sockets"
        collectives: Collectives = MeshCollectives(mesh, rank, size)
        if backend != "sockets":
            if backend == "gloo" and host in LOOPBACK_HOSTS:
                # Else gloo resolves the host's name, which need not lead back here.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            _init_torch(backend, store, rank, size, device, timeout_seconds)
            collectives = TorchCollectives()
        return cls(
            rank=rank,
            size=size,
            mesh=mesh,
            collectives=collectives,
            store=store,
            host=host,
            secret=secret,
            silence_seconds=silence_seconds,
            watch=watch,
        )

    def begin_steps(self) -> None:
        """Waits until all ranks call it, each once it has started; from now on a peer that keeps
        the others waiting for `silence_seconds` is lost."""
        self.exchange([0])
        if self._silence_seconds is None:
            return
        self._mesh.limit_silence(self._silence_seconds)
        if self.uses_torch:
            _set_pg_timeout(timedelta(seconds=self._silence_seconds))
        if self._watch is not None:
            self._watch.limit_steps(self._silence_seconds)

    def exchange(self, facts: Sequence[int]) -> list[tuple[int, ...]]:
        """All ranks' facts, by rank; equally many int64 on each. Begins a step."""
        if self._watch is not None:
            self._watch.beat()
        own = memoryview(array("q", facts).tobytes())
        incoming = [memoryview(bytearray(len(own))) for _ in range(self.size)]
        incoming[self.rank][:] = own
        self._mesh.swap([own] * self.size, incoming)
        return [tuple(one.cast("q")) for one in incoming]

    @property
    def uses_torch(self) -> bool:
        """Whether torch.distributed is up, with all ranks of the group in it."""
        return isinstance(self.collectives, TorchCollectives)

    @property
    def steps_use_sockets(self) -> bool:
        """Whether tensors travel on the connections of `exchange`: none may begin then while a
        step is being computed."""
        return self.size > 1 and not self.uses_torch

    def broadcast(self, payload: bytes, num_bytes: int) -> bytes:
        """Rank 0's payload, on all ranks; all know its length, others pass b""."""
        here = self.rank == 0
        assert not here or len(payload) == num_bytes, (len(payload), num_bytes)
        from_first = memoryview(bytearray(0 if here else num_bytes))
        incoming = [from_first, *[memoryview(bytearray())] * (self.size - 1)]
        self._mesh.swap([memoryview(payload if here else b"")] * self.size, incoming)
        return payload if here else bytes(from_first)

    def gather(self, own: bytes) -> list[bytes]:
        """Equally long payloads of all ranks, on rank 0; elsewhere nothing."""
        here = self.rank == 0
        incoming = [memoryview(bytearray(len(own) if here else 0)) for _ in range(self.size)]
        outgoing = [memoryview(own if r == 0 else b"") for r in range(self.size)]
        self._mesh.swap(outgoing, incoming)
        return [own, *map(bytes, incoming[1:])] if here else []

    def side_connections(self, name: str, timeout_seconds: float) -> dict[int, socket.socket]:
        """New connections to all other ranks, by rank; all ask for the same name, each name once.
        For any thread. Unavailable when not all ranks come within the time."""
        if self._store is None:
            return {}
        # A connection to it of our own: NCCL uses the other one, and may not wait for us.
        store = dist.PrefixStore(f"side/{name}", self._store.clone())
        store.set_timeout(timedelta(seconds=timeout_seconds))
        return connect_all(
            store,
            self._host,
            self._secret,
            rank=self.rank,
            size=self.size,
            timeout=timeout_seconds,
        )

    def idle_wait(self, inbox: zmq.Socket[bytes], timeout_seconds: float) -> None:
        """Returns when `inbox` is readable, a peer has begun the next exchange or called `wake`, or
        the time (in whole milliseconds) is over."""
        poller = zmq.Poller()
        poller.register(inbox, zmq.POLLIN)
        for connection in self._mesh.sockets:
            poller.register(connection.fileno(), zmq.POLLIN)
        with self._watch.idle() if self._watch is not None else nullcontext():
            poller.poll(math.ceil(timeout_seconds * 1000))
        self.peer_woke()  # finds a peer that died while no rank had work

    def wake(self) -> None:
        """Sends all peers into the next exchange ahead of our own facts."""
        self._mesh.wake()

    def peer_woke(self) -> bool:
        """Whether a peer waits for the next exchange."""
        return self._mesh.has_news()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._mesh.close()
        if isinstance(self.collectives, TorchCollectives):
            dist.destroy_process_group()
        self._store = None


def _init_torch(
    backend: str,
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    timeout_seconds: float,
) -> None:
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("torch", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=_with_index(device) if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        raise Unavailable(f"EP rank {rank} cannot start {backend}: {error}") from error


def _with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
