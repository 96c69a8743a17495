"""Pods and rosters without any I/O: what late, doubled and reordered news may do."""

from typing import Any

import pytest

from proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from router.discovery.kubernetes_pods import PodSet, parse_pod
from router.discovery.members import Join, Leave, Member, Roster
from router.workers.worker import Standing


def pod(
    uid: str,
    *,
    name: str = "",
    ip: str = "10.0.0.1",
    ready: bool = True,
    created: str = "2026-01-01T00:00:00Z",
    terminating: bool = False,
    phase: str = "Running",
) -> dict[str, Any]:
    metadata = {"uid": uid, "name": name or uid, "creationTimestamp": created}
    if terminating:
        metadata["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    status = {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]}
    return {"metadata": metadata, "status": status | ({"podIP": ip} if ip else {})}


def known(pods: PodSet) -> dict[str, Standing]:
    return {member.id: member.standing for member in pods.members()}


@pytest.fixture
def pods() -> PodSet:
    return PodSet(ROLE_DECODE, 7000)


def test_what_is_deleted_stays_so_until_a_list_says_otherwise(pods: PodSet) -> None:
    pods.apply("ADDED", pod("a"))
    pods.apply("DELETED", pod("a"))
    pods.apply("MODIFIED", pod("a"))  # late
    pods.apply("ADDED", pod("a"))  # and doubled
    assert known(pods) == {}
    pods.apply("DELETED", pod("b"))  # before it was ever added
    pods.apply("ADDED", pod("b"))
    assert known(pods) == {}
    pods.replace([pod("a")])
    assert known(pods) == {"a": Standing.OPEN}
    pods.apply("MODIFIED", pod("a", ready=False))
    assert known(pods) == {"a": Standing.HELD}


def test_late_news_undo_nothing_that_cannot_be_undone(pods: PodSet) -> None:
    pods.apply("MODIFIED", pod("a", terminating=True))
    pods.apply("MODIFIED", pod("a", ip=""))
    assert known(pods) == {"a": Standing.CLOSING}
    pods.apply("MODIFIED", pod("b", phase="Failed"))
    pods.apply("MODIFIED", pod("b"))
    assert known(pods) == {"a": Standing.CLOSING}
    pods.replace([pod("a"), pod("b")])
    assert known(pods) == {"a": Standing.OPEN, "b": Standing.OPEN}


def test_a_name_belongs_to_the_youngest(pods: PodSet) -> None:
    old = pod("old", name="w-0", created="2026-01-01T00:00:00Z")
    new = pod("new", name="w-0", created="2026-01-01T00:00:09Z")
    pods.apply("ADDED", old)
    pods.apply("ADDED", new)  # the end of the old one was missed
    assert known(pods) == {"new": Standing.OPEN}
    pods.apply("MODIFIED", old)
    assert known(pods) == {"new": Standing.OPEN}
    pods.replace([new])
    pods.apply("MODIFIED", old)  # not known to be deleted, but too old for its name
    assert known(pods) == {"new": Standing.OPEN}


def test_a_pod_waits_for_its_ip_and_leaves_when_it_has_ended(pods: PodSet) -> None:
    pods.apply("ADDED", pod("a", ip="", ready=False, phase="Pending"))
    assert known(pods) == {}
    pods.apply("MODIFIED", pod("a", ready=False))
    assert known(pods) == {"a": Standing.HELD}
    pods.apply("MODIFIED", pod("a", phase="Succeeded"))
    assert known(pods) == {}


@pytest.mark.parametrize(
    "nonsense",
    [
        {}, {"metadata": None}, {"metadata": {"uid": "a"}}, {"metadata": {"uid": 1, "name": "a"}},
        {"metadata": [], "spec": 3, "status": "x"},
    ],
)  # fmt: skip
def test_what_is_no_pod_is_passed_over(pods: PodSet, nonsense: dict[str, Any]) -> None:
    assert parse_pod(nonsense) is None
    pods.apply("ADDED", nonsense)
    pods.replace([nonsense])
    assert known(pods) == {}


def test_odd_shapes_inside_a_pod_do_no_harm() -> None:
    odd = {
        "metadata": {"uid": "a", "name": "a", "creationTimestamp": None},
        "spec": {"containers": [None, {"ports": {}}, {"ports": [{"name": "grpc"}, 5]}]},
        "status": {"conditions": ["x", {"type": "Ready"}], "podIP": None},
    }
    found = parse_pod(odd)
    assert found is not None
    assert (found.ip, found.port, found.ready, found.created) == ("", 0, False, "")


# ---- the roster


def member(name: str, address: str, **fields: Any) -> Member:
    return Member(**{"id": name, "address": address, "role": ROLE_DECODE} | fields)


def test_only_changes_are_told_and_leaves_come_first() -> None:
    roster = Roster()
    a, b = member("a", "h:1"), member("b", "h:2")
    assert roster.update("s", [a, b]) == [Join(a), Join(b)]
    assert roster.update("s", [b, a]) == []
    held = member("b", "h:2", standing=Standing.HELD)
    assert roster.update("s", [a, held]) == [Join(held)]
    moved = member("a", "h:9")
    assert roster.update("s", [held, moved]) == [Leave(a), Join(moved)]
    successor = member("c", "h:2")
    assert roster.update("s", [successor]) == [Leave(held), Leave(moved), Join(successor)]


def test_sources_do_not_disturb_each_other() -> None:
    roster = Roster()
    a, b = member("a", "h:1"), member("b", "h:2", role=ROLE_PREFILL)
    roster.update("decode", [a])
    assert roster.update("prefill", [b]) == [Join(b)]
    assert roster.update("decode", []) == [Leave(a)]
    assert list(roster.members) == [b]


def test_an_address_has_one_member_the_last_that_stays() -> None:
    roster = Roster()
    old = member("old", "h:1", created="2026-01-01T00:00:00Z")
    new = member("new", "h:1", created="2026-01-01T00:00:05Z")
    roster.update("s", [old])
    assert roster.update("s", [new, old]) == [Leave(old), Join(new)]
    assert roster.update("s", [old, new]) == []
    leaving = member("new", "h:1", created=new.created, standing=Standing.CLOSING)
    assert roster.update("s", [old, leaving]) == [Leave(new), Join(old)]
    assert roster.update("s", [leaving]) == [Leave(old), Join(leaving)]
