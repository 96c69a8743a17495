"""What to ask about a group, from what an operator says of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core.group_plan import Gpu, GroupQuestion
from ctl.base.flags import WorkerRole, flag_arguments

# Flags that say which group it is: --ranks, not --set.
_DECIDED = frozenset({"model", "device", "ranks", "nodes", "node-rank", "rendezvous"})
# Groups of several nodes must have one; nothing goes there.
_RENDEZVOUS = "127.0.0.1:1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What all groups of a plan have in common; `shown_name` is that of the model."""

    model: Path
    shown_name: str
    gpu: Gpu
    has_deep_ep: bool = True
    has_rdma: bool = True

    def group(
        self, role: WorkerRole, nodes: int, ranks: int, settings: Mapping[str, str]
    ) -> GroupQuestion:
        """ValueError for a setting that has an option of its own."""
        if taken := sorted(_DECIDED & set(settings)):
            raise ValueError(f"{role}.{taken[0]} is decided by the group's own options")
        flags = {
            "model": str(self.model),
            "device": "cuda",
            "ranks": str(ranks),
            "nodes": str(nodes),
            **({"rendezvous": _RENDEZVOUS} if nodes > 1 else {}),
            "served-model-name": self.shown_name,
            **settings,
        }
        return GroupQuestion(
            name=role,
            role=role,
            flags=tuple(flag_arguments(flags)),
            gpu=self.gpu,
            has_deep_ep=self.has_deep_ep,
            has_rdma=self.has_rdma,
        )
