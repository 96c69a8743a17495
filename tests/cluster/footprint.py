"""What the processes of a cluster hold: file descriptors by name, and how many they are."""

from dataclasses import dataclass

import psutil

from tests.cluster.harness import Cluster


@dataclass(frozen=True)
class Footprint:
    """`num_fds` by the process's name, a worker's ranks summed up under its own."""

    num_fds: dict[str, int]
    num_processes: int


def footprint(cluster: Cluster) -> Footprint:
    """Of gateway, router, workers and ranks, as they are now."""
    status = cluster.status()
    identities = [*status.processes, *(worker.identity for worker in status.workers)]
    num_fds = {}
    for identity in identities:
        process = psutil.Process(identity.pid)
        family = [process, *process.children(recursive=True)]
        num_fds[identity.name] = sum(member.num_fds() for member in family)
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    return Footprint(num_fds, len(family))


def grown(before: Footprint, after: Footprint) -> dict[str, int]:
    """By how many descriptors each process holds more than before."""
    return {
        name: after.num_fds[name] - count
        for name, count in before.num_fds.items()
        if after.num_fds.get(name, 0) > count
    }
