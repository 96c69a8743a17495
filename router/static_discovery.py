"""Workers from the command line: always the same."""

from collections.abc import Iterable, Mapping

from proto.worker_pb2 import Role
from router.discovery import Member, Report


class StaticDiscovery:
    def __init__(self, addresses: Mapping[Role.ValueType, Iterable[str]]) -> None:
        self._members = [
            Member(id=address, address=address, role=role)
            for role, listed in addresses.items()
            for address in dict.fromkeys(listed)
        ]

    async def follow(self, report: Report) -> None:
        report("static", self._members)
