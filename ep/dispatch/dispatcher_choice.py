"""Which dispatcher a group takes: decided from what all ranks say of themselves, by all alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ep.dispatch.buffer_plan import NVLINK_PEERS
from ep.dispatch.deep_ep_limits import refusal
from ep.dispatch.dispatch_needs import DispatchNeeds

DispatcherName = Literal["local", "collective", "deep_ep"]
Wanted = Literal["auto", "local", "collective", "deep_ep"]


class RankFacts(NamedTuple):
    """What a rank knows of itself, in numbers that `EpGroup.exchange` tells to all; yes is 1.

    installed  whether `import deep_ep` works
    hopper     whether its device is a GPU that DeepEP is made for
    host       a number that is the same on the ranks of a machine, and on those only
    device     index of its GPU there
    peers      bit i: whether GPU i of the machine can be reached directly
    rdma       whether the machine has a network that GPUs can send over by themselves
    """

    installed: int
    hopper: int
    host: int
    device: int
    peers: int
    rdma: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`reason` is why it is not DeepEP, or why it is; `is_wish` that nothing else will do."""

    name: DispatcherName
    reason: str
    is_wish: bool = False


def choose(wanted: Wanted, needs: DispatchNeeds, ranks: Sequence[RankFacts]) -> Choice:
    """ValueError when what is wanted cannot be had."""
    if wanted == "local" and len(ranks) > 1:
        raise ValueError(f"ep-dispatcher local serves one rank, the group has {len(ranks)}")
    if len(ranks) == 1 and wanted != "deep_ep":
        return Choice(name="local", reason="the group is one rank")
    if wanted == "collective":
        return Choice(name="collective", reason="it was asked for", is_wish=True)
    obstacle = deep_ep_obstacle(needs, ranks)
    if not obstacle:
        reason, is_wish = "all ranks reach each other directly", wanted == "deep_ep"
        return Choice(name="deep_ep", reason=reason, is_wish=is_wish)
    if wanted == "deep_ep":
        raise ValueError(f"ep-dispatcher deep_ep cannot be had: {obstacle}")
    return Choice(name="collective", reason=f"no DeepEP: {obstacle}")


def deep_ep_obstacle(needs: DispatchNeeds, ranks: Sequence[RankFacts]) -> str:
    """Why this group cannot use DeepEP; "" when it can."""
    without = [rank for rank, facts in enumerate(ranks) if not facts.installed]
    if without:
        return f"it is not installed{_on(without, ranks)}"
    others = [rank for rank, facts in enumerate(ranks) if not facts.hopper]
    if others:
        return f"the device is no Hopper GPU or later{_on(others, ranks)}"
    return refusal(needs, len(ranks)) or _path_obstacle(ranks)


def _path_obstacle(ranks: Sequence[RankFacts]) -> str:
    """DeepEP takes eight ranks in a row for a node, and all of a smaller group for one."""
    for first in range(0, len(ranks), NVLINK_PEERS):
        node = ranks[first : first + NVLINK_PEERS]
        for rank, facts in enumerate(node, start=first):
            if facts.host != node[0].host:
                return f"ranks {first} and {rank} would have to be on one machine"
            for peer, other in enumerate(node, start=first):
                if peer != rank and not facts.peers >> other.device & 1:
                    return f"rank {rank} does not reach the GPU of rank {peer} directly"
    apart = len(ranks) > NVLINK_PEERS
    without = [rank for rank, facts in enumerate(ranks) if apart and not facts.rdma]
    return f"there is no RDMA between machines{_on(without, ranks)}" if without else ""


def _on(some: Sequence[int], ranks: Sequence[RankFacts]) -> str:
    if len(some) == len(ranks):
        return ""
    return f" on rank{'s' if len(some) > 1 else ''} {', '.join(map(str, some))}"
