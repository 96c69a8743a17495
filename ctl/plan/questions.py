"""What to ask about a group, from what an operator says of it."""

from core.group_plan import Gpu, GroupQuestion
from ctl.base.flags import flag_arguments
from ctl.plan.values_file import WorkerValues

# Flags that say which group it is: --ranks, not --set.
_DECIDED = frozenset({"model", "device", "ranks", "nodes", "node-rank", "rendezvous"})
# Groups of several nodes must have one; nothing goes there.
_RENDEZVOUS = "127.0.0.1:1"


def question(
    group: WorkerValues, *, model: str, shown_name: str, gpu: Gpu, deep_ep: bool, rdma: bool
) -> GroupQuestion:
    """`shown_name` is that of the model. ValueError for a setting that has an option of its
    own."""
    if taken := sorted(_DECIDED & set(group.settings)):
        raise ValueError(f"{group.role}.{taken[0]} is decided by the group's own options")
    flags = {
        "model": model,
        "device": group.device,
        "ranks": str(group.ranks),
        "nodes": str(group.nodes),
        **({"rendezvous": _RENDEZVOUS} if group.nodes > 1 else {}),
        "served-model-name": shown_name,
        **group.settings,
    }
    return GroupQuestion(
        name=group.role,
        role=group.role,
        flags=tuple(flag_arguments(flags)),
        gpu=gpu,
        has_deep_ep=deep_ep,
        has_rdma=rdma,
    )
