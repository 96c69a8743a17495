"""Following each worker: a WatchStatus stream from its joining until it leaves, opened again
whenever it ends."""

import asyncio
from collections.abc import Callable, Coroutine

import grpc

from core.log import get_logger
from proto.worker_pb2 import WatchStatusRequest, WorkerStatus
from proto.worker_pb2_grpc import WorkerStub
from router.cluster import Cluster
from router.discovery.members import Join, Leave, Member
from router.settings import RouterSettings
from router.workers.table import Left, StatusArrived, Stood, StreamBroken
from router.workers.worker import role_name
from rpc.client import channel

log = get_logger("router.watch")

FIRST_BACKOFF_SECONDS = 0.05
# Processes that start together find one another sooner.
UNREACHABLE_SECONDS = 10.0


class Watchers:
    """`watch` is run for each member, in a task of `group`; `close` ends them."""

    def __init__(
        self,
        cluster: Cluster,
        watch: Callable[[Member], Coroutine[None, None, None]],
        group: asyncio.TaskGroup,
    ) -> None:
        self._cluster = cluster
        self._watch = watch
        self._group = group
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def apply(self, event: Join | Leave) -> None:
        if self._closed:  # discovery may have had a last word on its way
            return
        member = event.member
        match event:
            case Join():
                self._cluster.apply(Stood(member.address, member.standing))
                if member.id in self._tasks:
                    _log("worker stands differently", member)
                    return
                _log("worker joined", member)
                self._tasks[member.id] = self._group.create_task(
                    self._watch(member), name=f"watch {member.address}"
                )
            case Leave():
                _log("worker left", member)
                # From here on the task reports nothing: a cancelled one never comes that far.
                self._tasks.pop(member.id).cancel()
                self._cluster.apply(Left(member.address))

    def close(self) -> None:
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()


async def watch_worker(
    member: Member,
    report: Callable[[StatusArrived | StreamBroken], None],
    settings: RouterSettings,
) -> None:
    """Reports what the worker says and when its stream breaks; until cancelled.

    Of a worker that was never heard nothing is in the table: the log tells that it is not reached.
    """
    loop = asyncio.get_running_loop()
    backoff = FIRST_BACKOFF_SECONDS
    silent_since, is_told = loop.time(), False
    while True:
        reason, heard = await _follow(member, report, settings)
        report(StreamBroken(member.address, reason))
        if heard:
            silent_since, is_told = loop.time(), False
        elif not is_told and loop.time() - silent_since >= UNREACHABLE_SECONDS:
            is_told = True
            log.warning(
                "worker cannot be reached",
                worker_role=role_name(member.role),
                address=member.address,
                reason=reason,
            )
        backoff = FIRST_BACKOFF_SECONDS if heard else backoff * 2
        await asyncio.sleep(min(backoff, settings.max_backoff_seconds))


async def _follow(
    member: Member, report: Callable[[StatusArrived], None], settings: RouterSettings
) -> tuple[str, bool]:
    """One stream until it ends: why it did, and whether a status came."""
    heard = False
    # A fresh channel each time: the back-off is ours alone, and so is the name look-up.
    async with channel(member.address) as peer:
        request = WatchStatusRequest(min_interval_ms=settings.status_interval_ms)
        stream = WorkerStub(peer).WatchStatus(request)
        try:
            while True:
                async with asyncio.timeout(settings.silence_seconds):
                    status = await stream.read()
                if not isinstance(status, WorkerStatus):
                    return "its status stream ended", heard
                heard = True
                report(StatusArrived(member.address, member.role, status))
        except TimeoutError:
            return f"it was silent for {settings.silence_seconds:g} s", heard
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}", heard
        finally:
            stream.cancel()


def _log(what: str, member: Member) -> None:
    log.info(
        what,
        worker_role=role_name(member.role),
        address=member.address,
        member=member.id,
        standing=member.standing.name.lower(),
    )
