"""One status stream for each member: opened when it joins, ended when it leaves."""

import asyncio
from collections.abc import Callable, Coroutine

from core.log import get_logger
from router.cluster import Cluster
from router.discovery import Join, Leave, Member
from router.table import Left, Stood
from router.worker import role_name

log = get_logger("router.watchers")


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
                if member.id not in self._tasks:
                    self._start(member)
                else:
                    _log("worker stands differently", member)
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

    def _start(self, member: Member) -> None:
        _log("worker joined", member)
        self._tasks[member.id] = self._group.create_task(
            self._watch(member), name=f"watch {member.address}"
        )


def _log(what: str, member: Member) -> None:
    log.info(
        what,
        worker_role=role_name(member.role),
        address=member.address,
        member=member.id,
        standing=member.standing.name.lower(),
    )
