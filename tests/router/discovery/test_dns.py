"""Names with many addresses, resolvers that fail or hang, and the real one."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Collection

import pytest

from core.resolver import is_literal, resolve, system_lookup
from proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from router.discovery.dns import NUM_ABSENCES, DnsDiscovery, after_answer
from router.discovery.members import Member, Roster
from tests.eventually import eventually

PATIENCE_SECONDS = 30.0


class Zone:
    """A resolver that says what the test wants."""

    def __init__(self, **records: list[str]) -> None:
        self.records = records
        self.failing = False
        self.num_asked = 0

    def __call__(self, host: str, port: int) -> list[str]:
        self.num_asked += 1
        if self.failing:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [f"{ip}:{port}" for ip in self.records.get(host, [])]


class Followed:
    def __init__(self, zone: Zone) -> None:
        self.zone = zone
        self.roster = Roster()
        self.num_failures = 0
        names = {"prefill:1": ROLE_PREFILL, "decode:2": ROLE_DECODE}
        discovery = DnsDiscovery(names, interval_seconds=0.01, on_failure=self._fail, lookup=zone)
        self.task = asyncio.create_task(discovery.follow(self._report))

    def _fail(self) -> None:
        self.num_failures += 1

    def _report(self, source: str, members: Collection[Member]) -> None:
        self.roster.update(source, members)

    @property
    def addresses(self) -> set[str]:
        return {member.address for member in self.roster.members}

    async def until(self, holds: Callable[[], bool]) -> None:
        await eventually(holds, PATIENCE_SECONDS)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_addresses_come_and_go_with_their_role() -> None:
    zone = Zone(prefill=["10.0.0.1"], decode=[])
    followed = Followed(zone)
    await followed.until(lambda: followed.addresses == {"10.0.0.1:1"})
    zone.records["decode"] = ["10.0.0.2", "10.0.0.3"]
    await followed.until(lambda: followed.addresses == {"10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:2"})
    assert {m.role for m in followed.roster.members if m.address != "10.0.0.1:1"} == {ROLE_DECODE}
    zone.records["decode"] = ["10.0.0.3"]
    await followed.until(lambda: followed.addresses == {"10.0.0.1:1", "10.0.0.3:2"})
    await followed.close()


async def test_a_resolver_that_fails_changes_nothing() -> None:
    zone = Zone(decode=["10.0.0.2"])
    followed = Followed(zone)
    await followed.until(lambda: followed.addresses == {"10.0.0.2:2"})
    zone.failing = True
    await followed.until(lambda: followed.num_failures > 3 * NUM_ABSENCES)
    assert followed.addresses == {"10.0.0.2:2"}
    zone.records["decode"] = ["10.0.0.4"]
    zone.failing = False
    await followed.until(lambda: followed.addresses == {"10.0.0.4:2"})
    await followed.close()


def test_one_answer_without_an_address_is_no_proof() -> None:
    counted = after_answer({}, ["a", "b"])
    for _ in range(NUM_ABSENCES - 1):
        counted = after_answer(counted, ["b"])
        assert list(counted) == ["a", "b"]
    assert list(after_answer(counted, ["a", "b"])) == ["a", "b"]
    assert list(after_answer(counted, ["b"])) == ["b"]
    gone = after_answer({"a": NUM_ABSENCES - 1}, [])
    assert gone == {}


async def test_a_resolver_that_hangs_holds_nobody_up() -> None:
    release = threading.Event()

    def hang(host: str, port: int) -> list[str]:
        release.wait(30)
        return []

    began = time.monotonic()
    with pytest.raises(OSError, match="no answer for 'slow' within"):
        await resolve("slow:1", timeout_seconds=0.05, lookup=hang)
    assert time.monotonic() - began < 5
    release.set()


async def test_the_system_resolver() -> None:
    assert await resolve("localhost:80", timeout_seconds=10) == ["127.0.0.1:80"]
    assert system_lookup("127.0.0.3", 5) == ["127.0.0.3:5"]
    assert system_lookup("::1", 5) == ["[::1]:5"]
    with pytest.raises(OSError, match="label"):
        await resolve(f"{'x' * 300}.invalid:1", timeout_seconds=10)
    assert is_literal("[::1]:5")
    assert is_literal("127.0.0.1:5")
    assert not is_literal("localhost:5")
