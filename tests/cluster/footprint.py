"""What the processes of a cluster hold: descriptors, tasks, and how many processes they are."""

from dataclasses import dataclass

import httpx
import psutil

from tests.cluster.harness import Cluster, ClusterClient


@dataclass(frozen=True)
class Footprint:
    """`num_fds` by the process's name, a worker's ranks summed up under its own; asyncio tasks
    are the gateway's."""

    num_fds: dict[str, int]
    num_processes: int
    num_gateway_tasks: int


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
    num_tasks = int(gateway_metric(cluster, "epserve_gateway_tasks"))
    assert num_tasks > 0
    return Footprint(num_fds, len(family), num_tasks)


def gateway_metric(cluster: ClusterClient, name: str) -> float:
    """Sum over all labels; 0 before there is one."""
    text = httpx.get(f"{cluster.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith((name + " ", name + "{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def grown(before: Footprint, after: Footprint) -> dict[str, int]:
    """By how many descriptors each process holds more than before, and tasks the gateway."""
    tasks = after.num_gateway_tasks - before.num_gateway_tasks
    return {"gateway tasks": max(0, tasks)} | {
        name: after.num_fds[name] - count
        for name, count in before.num_fds.items()
        if after.num_fds.get(name, 0) > count
    }
