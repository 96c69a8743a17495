"""Groups whose ranks are threads of this process: what needs no process of its own is quick."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ep.group.collectives import MeshCollectives
from ep.group.group import EpGroup
from ep.group.mesh import SocketMesh

PATIENCE_SECONDS = 60.0


class Meeting:
    """Where the threads of a group swap values; everybody gets everybody's."""

    def __init__(self, size: int) -> None:
        self._values: list[object] = [None] * size
        self._barrier = threading.Barrier(size, timeout=PATIENCE_SECONDS)

    def swap(self, rank: int, value: object) -> list[object]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def abort(self) -> None:
        self._barrier.abort()


def thread_groups(size: int) -> list[EpGroup]:
    """Connected groups of the ranks 0 .. size - 1; collectives are over sockets."""
    peers: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                peers[low][high] = socket.create_connection(listener.getsockname())
                peers[high][low], _ = listener.accept()
    groups = []
    for rank in range(size):
        mesh = SocketMesh(rank, peers[rank], PATIENCE_SECONDS)
        collectives = MeshCollectives(mesh, rank, size)
        groups.append(EpGroup(rank=rank, size=size, mesh=mesh, collectives=collectives, store=None))
    return groups


def on_all_ranks(size: int, program: Callable[[EpGroup, Meeting], object]) -> list[object]:
    """What `program` returns on each rank; raises what the first rank to fail raised. A failed
    rank closes its connections, so that the others do not wait for it."""
    groups, meeting = thread_groups(size), Meeting(size)
    failures: list[Exception] = []

    def run(rank: int) -> object:
        try:
            return program(groups[rank], meeting)
        except Exception as error:
            failures.append(error)
            meeting.abort()
            groups[rank].close()
            raise

    with ThreadPoolExecutor(size) as executor:
        futures = [executor.submit(run, rank) for rank in range(size)]
    for group in groups:
        group.close()
    if failures:
        raise failures[0]
    return [future.result() for future in futures]
