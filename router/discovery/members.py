"""Which workers there are: sources name them, a roster says what has changed.

A source (static, DNS, Kubernetes) reports all the members it knows, again after every change;
the roster turns that into Join and Leave, one member an address.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from proto.worker_pb2 import Role
from router.workers.worker import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker to follow. `id` never returns for another worker (a pod's uid); where nothing
    tells two processes at one address apart it is the address. `created` sorts by age."""

    id: str
    address: str
    role: Role.ValueType
    standing: Standing = Standing.OPEN
    created: str = ""


class DiscoveryError(ValueError):
    """There is no way to discover workers as the settings say."""


@dataclass(frozen=True, slots=True)
class Join:
    """A new member, or one known by this id whose standing has changed."""

    member: Member


@dataclass(frozen=True, slots=True)
class Leave:
    member: Member


# Called with the source's name and all members that it knows now.
Report = Callable[[str, Collection[Member]], None]


class Discovery(Protocol):
    async def follow(self, report: Report) -> None:
        """Reports until cancelled; returns early when there will never be a change. Calls
        `report` in the event loop only."""
        ...


class Roster:
    """What all sources say together. Of several members with one address (a pod recreated at
    the same IP whose end nobody has told yet) the last that is not on its way out counts."""

    def __init__(self) -> None:
        self._reported: dict[str, tuple[Member, ...]] = {}
        self._members: dict[str, Member] = {}

    @property
    def members(self) -> Collection[Member]:
        return self._members.values()

    def update(self, source: str, members: Collection[Member]) -> list[Join | Leave]:
        """What changes when `source` knows exactly `members`; leaves come first."""
        self._reported[source] = tuple(members)
        before, after = self._members, self._by_id()
        self._members = after
        left = [member for member in before.values() if not _continues(member, after)]
        joined = [member for member in after.values() if before.get(member.id) != member]
        return [*map(Leave, left), *map(Join, joined)]

    def _by_id(self) -> dict[str, Member]:
        by_address: dict[str, Member] = {}
        for members in self._reported.values():
            for member in members:
                rival = by_address.get(member.address)
                if rival is None or _rank(rival) < _rank(member):
                    by_address[member.address] = member
        return {member.id: member for member in by_address.values()}


def _rank(member: Member) -> tuple[bool, str, str]:
    return member.standing is not Standing.CLOSING, member.created, member.id


def _continues(member: Member, after: dict[str, Member]) -> bool:
    now = after.get(member.id)
    return now is not None and (now.address, now.role) == (member.address, member.role)
