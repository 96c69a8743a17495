"""Workers of DNS names with many addresses: headless services, or records kept by hand."""

import asyncio
from collections.abc import Callable, Mapping

from core.log import get_logger
from core.resolver import Lookup, resolve, system_lookup
from proto.worker_pb2 import Role
from router.discovery.members import Member, Report
from router.workers.worker import role_name

log = get_logger("router.dns_discovery")

LOOKUP_SECONDS = 5.0
# Answers in a row without an address until it leaves: some servers leave out records at random,
# and a worker that is really gone is noticed by its silence long before.
NUM_ABSENCES = 3


class DnsDiscovery:
    """Looks each `name:port` up every `interval_seconds`. A failed look-up changes nothing."""

    def __init__(
        self,
        names: Mapping[str, Role.ValueType],
        *,
        interval_seconds: float,
        on_failure: Callable[[], None],
        lookup: Lookup = system_lookup,
    ) -> None:
        self._names = names
        self._interval_seconds = interval_seconds
        self._on_failure = on_failure
        self._lookup = lookup

    async def follow(self, report: Report) -> None:
        async with asyncio.TaskGroup() as names:
            for name, role in self._names.items():
                names.create_task(self._follow_name(name, role, report))

    async def _follow_name(self, name: str, role: Role.ValueType, report: Report) -> None:
        absences: dict[str, int] = {}
        problem = ""
        while True:
            try:
                found = await resolve(name, timeout_seconds=LOOKUP_SECONDS, lookup=self._lookup)
            except OSError as error:
                self._on_failure()
                if str(error) != problem:
                    problem = str(error)
                    log.warning("name cannot be looked up", dns_name=name, reason=problem)
            else:
                if problem:
                    log.info("name can be looked up again", dns_name=name)
                problem = ""
                before = list(absences)
                absences = after_answer(absences, found)
                if list(absences) != before:
                    log.info(
                        "name has new addresses",
                        dns_name=name, worker_role=role_name(role), num_addresses=len(absences),
                    )  # fmt: skip
                report(name, [Member(id=a, address=a, role=role) for a in absences])
            await asyncio.sleep(self._interval_seconds)


def after_answer(absences: Mapping[str, int], found: list[str]) -> dict[str, int]:
    """Addresses that count after an answer, with the number of answers since each was in one."""
    counted = dict.fromkeys(found, 0) | {
        address: number + 1 for address, number in absences.items() if address not in found
    }
    kept = {address: number for address, number in counted.items() if number < NUM_ABSENCES}
    return dict(sorted(kept.items()))
