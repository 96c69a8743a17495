"""How one machine's GPUs can be shared out to a prefill and a decode worker, so that both fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from core.group_plan import Gpu, GroupPlan, GroupQuestion
from ctl.base.flags import WORKER_ROLES, WorkerRole, flag_arguments
from ctl.plan.asking import ask, has_deep_ep

_FREE = 0.98  # of its memory, where nothing runs on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One worker of each role with `ranks`; where `shares`, both on the same GPUs. `int4`: with
    experts as `ctl quantize` makes them."""

    ranks: int
    shares: bool
    int4: bool

    def text(self) -> str:
        """As options of `ctl up`."""
        workers = " ".join(
            f"--{role}-workers 1 --{role}-ranks {self.ranks}" for role in WORKER_ROLES
        )
        return workers + (" and a w4afp8 checkpoint (ctl quantize)" if self.int4 else "")

    def flags(self) -> dict[str, str]:
        return {"ranks": str(self.ranks), **({"gpu-memory-share": "0.5"} if self.shares else {})}


def fitting_layout(
    flags: Mapping[WorkerRole, Mapping[str, str]], gpus: Sequence[Gpu]
) -> tuple[Layout, Sequence[GroupPlan]] | None:
    """The first that fits, and its plans; None when none does. `flags` are those of each role that
    do not depend on it."""
    gpu = fullest(gpus)
    layouts = _layouts(len(gpus), is_free=gpu.free_bytes > _FREE * gpu.total_bytes)
    plans = ask(
        [
            GroupQuestion(
                name=role,
                role=role,
                flags=tuple(flag_arguments({**flags[role], **layout.flags()})),
                gpu=gpu,
                has_deep_ep=has_deep_ep(),
                int4=layout.int4,
                most_ranks=0,
            )
            for layout in layouts
            for role in WORKER_ROLES
        ]
    )
    by_layout = [plans[i : i + len(WORKER_ROLES)] for i in range(0, len(plans), len(WORKER_ROLES))]
    for layout, both in zip(layouts, by_layout, strict=True):
        if not any(plan.problem for plan in both):
            return layout, both
    return None


def fullest(gpus: Sequence[Gpu]) -> Gpu:
    """That with least memory left."""
    return min(gpus, key=lambda gpu: gpu.free_bytes)


def _layouts(num_gpus: int, *, is_free: bool) -> list[Layout]:
    """Halves of the machine before all of it for both, which takes GPUs that nobody else uses; int4
    only where nothing else does."""
    shapes = [(num_gpus // 2, False), *([(num_gpus, True)] if is_free else [])]
    return [
        Layout(ranks=ranks, shares=shares, int4=int4)
        for int4, (ranks, shares) in product((False, True), shapes)
        if ranks
    ]
