"""Does what a scenario says to a cluster of `ctl up`, and undoes it again."""

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ctl.base.cluster_access import ClusterAccess
from ctl.bench import served_model
from ctl.chaos.clients import Clients
from ctl.chaos.faults import Fault, Kind, Layout
from ctl.chaos.limits import no_new_descriptors, no_writes
from ctl.local.own_cluster import NotOurs, OwnCluster
from ctl.local.proxies import Rule, control_path, ruled
from ctl.local.readiness import wait_until_ready
from loadgen.openai_stream import Target
from rpc.cluster_credentials import load

RECOVERY_SECONDS = 180.0
_LOOK_SECONDS = 0.2
# For others to notice that it serves again.
_SETTLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """What became of a fault, with times in seconds since the start of the scenario: when it
    began, and when what it had hit served again. `problem`: why it could not be done, or who does
    not serve again."""

    fault: Fault
    began: float
    over: float
    problem: str = ""


class Injector:
    """Of the processes of one role only one at a time is disturbed, so that there always is one to
    stand in for it: faults wait for each other."""

    def __init__(self, cluster: OwnCluster, clients: Clients) -> None:
        self._cluster = cluster
        self._clients = clients
        self._access = ClusterAccess.of_environment(cluster.environment())
        self._credentials = load(self._access)
        self._processes = cluster.processes()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @classmethod
    def of(cls, cluster: OwnCluster, api_key: str = "") -> "Injector":
        """Asks the gateway for its model. Raises OSError when it does not answer, ValueError when
        that makes no sense."""
        gateway = cluster.processes().get("gateway")
        if gateway is None:
            raise NotOurs("the gateway of this `ctl up` does not run")
        url = f"{'https' if gateway.spec.speaks_tls else 'http'}://{gateway.spec.address}"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        model = served_model(url, api_key)
        return cls(cluster, Clients(target=Target.parse(url), model=model, headers=headers))

    def layout(self) -> Layout:
        """What can be hit."""
        return Layout(
            roles=tuple((each.name, each.role) for each in self._processes.values()),
            has_proxies=control_path(self._cluster.run_folder).exists(),
            makes_token=self._own_token() is not None,
        )

    def check(self, faults: Sequence[Fault]) -> None:
        """Raises ValueError for one that this cluster cannot be hit by."""
        layout = self.layout()
        for fault in faults:
            if unknown := set(fault.targets) - self._processes.keys():
                raise ValueError(f"{fault}: there is no {', '.join(sorted(unknown))}")
            if fault.kind in (Kind.PARTITION, Kind.DELAY):
                if not layout.has_proxies:
                    raise ValueError(f"{fault}: this takes a `ctl up --proxies`")
                if {*fault.targets} not in map(set, layout.targets(fault.kind)):
                    raise ValueError(f"{fault}: they do not call each other")
            if fault.kind is Kind.CORRUPT_FILE and not layout.makes_token:
                raise ValueError(f"{fault}: the token is not of `ctl up`")

    async def run(
        self, faults: Sequence[Fault], on_done: Callable[[Injected], None] = lambda _: None
    ) -> list[Injected]:
        """All of them, in the order in which they were over. Whatever happens, nothing stays
        stopped, cut or limited."""
        started = time.monotonic()
        done: list[Injected] = []

        async def inject(index: int, fault: Fault) -> None:
            await asyncio.sleep(started + fault.at_seconds - time.monotonic())
            async with self._spares(fault):
                began = time.monotonic() - started
                problem = await self._inject(index, fault)
            over = time.monotonic() - started
            done.append(Injected(fault=fault, began=began, over=over, problem=problem))
            on_done(done[-1])

        async with asyncio.TaskGroup() as group:
            for index, fault in enumerate(faults):
                group.create_task(inject(index, fault))
        return done

    @asynccontextmanager
    async def _spares(self, fault: Fault) -> AsyncGenerator[None]:
        """While no other process of these roles, or the same thing of all of them, is
        disturbed."""
        async with AsyncExitStack() as stack:
            roles: set[str] = {self._processes[name].role for name in fault.targets}
            # In one order: none waits for one that waits for it.
            for name in sorted(roles or {fault.kind}):
                await stack.enter_async_context(self._locks[name])
            yield

    async def _inject(self, index: int, fault: Fault) -> str:
        """The problem, if there was one."""
        problem = ""
        try:
            async with self._effect(index, fault):
                await asyncio.sleep(fault.seconds)
        except (OSError, ValueError, KeyError) as error:  # TimeoutError is an OSError
            problem = f"{type(error).__name__}: {error}"
        fronts = {self._processes[name].front for name in fault.targets}
        for name in sorted(fronts):
            if not await self._serves(name):
                problem = problem or f"{name} does not serve after {RECOVERY_SECONDS:g} s"
        if fronts:
            await asyncio.sleep(_SETTLE_SECONDS)
        return problem

    @asynccontextmanager
    async def _effect(self, index: int, fault: Fault) -> AsyncGenerator[None]:
        """Raises OSError or KeyError for a process that is gone."""
        async with AsyncExitStack() as stack:
            running = self._cluster.processes()
            pids = [running[name].pid for name in fault.targets]
            match fault.kind:
                case Kind.KILL:
                    os.kill(pids[0], signal.SIGKILL)
                    await self._replaced(fault.targets[0], pids[0])
                case Kind.STOP:
                    stack.enter_context(_stopped(pids[0]))
                case Kind.PARTITION | Kind.DELAY:
                    one, other = fault.targets
                    delay = fault.delay_seconds if fault.kind is Kind.DELAY else None
                    rule = Rule(between=(one, other), delay_seconds=delay)
                    await stack.enter_async_context(ruled(self._cluster.run_folder, rule))
                case Kind.DESCRIPTORS:
                    stack.enter_context(no_new_descriptors(pids[0]))
                case Kind.FULL_DISK:
                    stack.enter_context(no_writes(pids[0]))
                case Kind.FULL_POOL:
                    await stack.enter_async_context(self._clients.crowd(index))
                case Kind.SLOW_READER:
                    await stack.enter_async_context(self._clients.slow_readers(index))
                case Kind.CORRUPT_FILE if (token := self._own_token()) is not None:
                    stack.enter_context(_corrupted(token))
            yield

    async def _serves(self, name: str) -> bool:
        """Whether it does within `RECOVERY_SECONDS`."""
        spec = self._processes[name].spec
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                await wait_until_ready(spec, self._credentials)
        except TimeoutError:
            return False
        return True

    async def _replaced(self, name: str, pid: int) -> None:
        """Raises TimeoutError when there is none in its place within `RECOVERY_SECONDS`."""
        async with asyncio.timeout(RECOVERY_SECONDS):
            while (now := self._cluster.processes().get(name)) is None or now.pid == pid:
                await asyncio.sleep(_LOOK_SECONDS)

    def _own_token(self) -> Path | None:
        """The file that `ctl up` has made; None: the operator's own is used."""
        token = self._access.cluster_token_file
        return token if token is not None and token.parent == self._cluster.run_folder else None


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it may have been taken for dead
            os.kill(pid, signal.SIGCONT)


@contextmanager
def _corrupted(file: Path) -> Iterator[None]:
    whole = file.read_bytes()
    file.write_bytes(b"\xff" + whole[1:])
    try:
        yield
    finally:
        file.write_bytes(whole)
