"""What of a cluster is stuck, and since when, from a router's status."""

from dataclasses import dataclass

from ctl.base.tables import format_age
from proto.router_pb2 import GetStatusResponse

# Idle ranks speak once a second, others with each step.
_QUIET_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """`what` has done nothing for `seconds`; `pid` is of the process to look at, on its machine."""

    what: str
    pid: int
    seconds: float
    why: str

    def sentence(self) -> str:
        return f"{self.what} (pid {self.pid}) for {format_age(self.seconds)}: {self.why}"


def find_stuck(reply: GetStatusResponse) -> list[Stuck]:
    """Workers that are not heard, then ranks that end no step."""
    lost = [
        Stuck(
            what=f"{each.identity.name} at {each.identity.address}",
            pid=each.identity.pid,
            seconds=round(each.seconds, 1),
            why=f"the router does not hear it ({each.reason})",
        )
        for each in reply.lost
    ]
    quiet = [
        Stuck(
            what=f"{worker.identity.name} rank {rank.rank}",
            pid=rank.pid,
            seconds=round(rank.quiet_seconds, 1),
            why=f"no step has ended, {rank.num_running} requests running and "
            f"{rank.num_waiting} waiting on it",
        )
        for worker in reply.workers
        for rank in worker.ranks
        if rank.quiet_seconds > _QUIET_SECONDS
    ]
    return lost + quiet
