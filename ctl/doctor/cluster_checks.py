"""What is stuck in a running cluster."""

import asyncio
from collections.abc import Iterator

from core.errors import EpserveError
from ctl.admin.connection import Target, connect
from ctl.admin.status import get_status
from ctl.admin.stuck import find_stuck
from ctl.base.cluster_access import find_token
from ctl.base.ports import LOOPBACK
from ctl.doctor.finding import Finding, ok, warning
from proto.router_pb2 import GetStatusResponse


def check_cluster(router: str, port: int) -> Iterator[Finding]:
    """Of the router at `router`; where none is given, of a `ctl up` that began at `port`, if there
    is one."""
    here = f"{LOOPBACK}:{port + 1}"
    if not router and find_token(here) is None:
        return
    router = router or here
    try:
        reply = asyncio.run(_status(router))
    except EpserveError as error:
        yield warning("cluster", error.message, "Is the router up? `ctl status` asks the same.")
        return
    stuck = find_stuck(reply)
    if not stuck:
        yield ok("cluster", f"the router at {router} knows of nothing that is stuck")
    for each in stuck:
        advice = f"`kill -URG {each.pid}` on its machine: its log then has where each thread is."
        yield warning("cluster", each.sentence(), advice)


async def _status(router: str) -> GetStatusResponse:
    async with connect(Target(router=router)) as admin:
        return await get_status(admin)
