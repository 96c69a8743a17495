"""The pods of one role as the Kubernetes API has told them: lists and events in, members out. Pure.

Resource versions are opaque, so nothing here compares them. What makes doubled, late and reordered
events harmless is what can never be undone for one uid: deleted, terminating, finished, having an
IP. A list is the whole truth of its moment and clears all that was believed before.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from core.address import Address
from proto.worker_pb2 import Role
from router.discovery.members import Member
from router.workers.worker import Standing

GRPC_PORT_NAME = "grpc"
FINISHED_PHASES = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What matters of one pod. `port` is 0 when it tells none, `created` an RFC 3339 text."""

    uid: str
    name: str
    created: str
    ip: str
    port: int
    ready: bool
    terminating: bool
    finished: bool


class PodSet:
    """`default_port` is dialled where a pod has no container port named grpc; 0: such pods are
    left out."""

    def __init__(self, role: Role.ValueType, default_port: int) -> None:
        self._role = role
        self._default_port = default_port
        self._pods: dict[str, Pod] = {}
        self._deleted: set[str] = set()

    def replace(self, items: Collection[Mapping[str, Any]]) -> None:
        """Takes in a list that was asked for after the last event."""
        found = [pod for item in items if (pod := parse_pod(item)) is not None]
        self._pods = {pod.uid: pod for pod in found}
        # Also the only way back for a uid: a pod whose labels matched no more and match again,
        # or a cluster put back from a backup.
        self._deleted.clear()

    def apply(self, kind: str, item: Mapping[str, Any]) -> None:
        """Takes in one event: ADDED, MODIFIED or DELETED."""
        pod = parse_pod(item)
        if pod is None or pod.uid in self._deleted:
            return
        if kind == "DELETED":
            self._delete(pod.uid)
            return
        # A name belongs to one pod at a time: a younger one proves that the older is gone.
        namesakes = [one for one in self._pods.values() if one.name == pod.name]
        for other in namesakes:
            if other.uid == pod.uid:
                continue
            if other.created > pod.created:
                return
            self._delete(other.uid)
        known = self._pods.get(pod.uid)
        self._pods[pod.uid] = pod if known is None else _later(known, pod)

    def members(self) -> list[Member]:
        """The workers of these pods, by uid."""
        found = [self._member(pod) for pod in self._pods.values() if pod.ip and not pod.finished]
        return sorted((one for one in found if one is not None), key=lambda member: member.id)

    @property
    def without_port(self) -> list[str]:
        """Names of pods that cannot be dialled for want of a port."""
        if self._default_port:
            return []
        return sorted(pod.name for pod in self._pods.values() if not pod.port)

    def _delete(self, uid: str) -> None:
        self._pods.pop(uid, None)
        self._deleted.add(uid)

    def _member(self, pod: Pod) -> Member | None:
        port = pod.port or self._default_port
        if not port:
            return None
        return Member(
            id=pod.uid,
            address=str(Address(pod.ip, port)),
            role=self._role,
            standing=_standing(pod),
            created=pod.created,
        )


def parse_pod(item: Mapping[str, Any]) -> Pod | None:
    """None for what is no pod with a uid and a name."""
    metadata, spec, status = (_mapping(item.get(key)) for key in ("metadata", "spec", "status"))
    uid, name = metadata.get("uid"), metadata.get("name")
    if not isinstance(uid, str) or not isinstance(name, str) or not uid or not name:
        return None
    conditions = [_mapping(one) for one in _listed(status.get("conditions"))]
    return Pod(
        uid=uid,
        name=name,
        created=str(metadata.get("creationTimestamp") or ""),
        ip=str(status.get("podIP") or ""),
        port=_grpc_port(spec),
        ready=any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions),
        terminating=bool(metadata.get("deletionTimestamp")),
        finished=status.get("phase") in FINISHED_PHASES,
    )


def _later(known: Pod, told: Pod) -> Pod:
    """`told` may be older than `known`: what cannot be undone stays."""
    return replace(
        told,
        ip=told.ip or known.ip,
        port=told.port or known.port,
        terminating=told.terminating or known.terminating,
        finished=told.finished or known.finished,
    )


def _standing(pod: Pod) -> Standing:
    """A worker's own status stream says within milliseconds whether it takes requests; the Ready
    condition says the same some probe periods later, and goes wrong in ways of its own (a busy
    kubelet, a node cut off from the API server, a probe that is too strict), often for all pods
    at once. So it ranks workers, and never leaves the last ones of a role without requests.
    Terminating is an order, not an observation: it always holds."""
    if pod.terminating:
        return Standing.CLOSING
    return Standing.OPEN if pod.ready else Standing.HELD


def _grpc_port(spec: Mapping[str, Any]) -> int:
    # Sidecars may be init containers (restartPolicy Always), so workers could be as well.
    containers = [*_listed(spec.get("containers")), *_listed(spec.get("initContainers"))]
    for container in map(_mapping, containers):
        for port in map(_mapping, _listed(container.get("ports"))):
            number = port.get("containerPort")
            if port.get("name") == GRPC_PORT_NAME and isinstance(number, int) and number > 0:
                return number
    return 0


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
