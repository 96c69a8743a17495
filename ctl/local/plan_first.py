"""Whether the workers of `ctl up` fit this machine's GPUs, before one is started."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from core.group_plan import Gpu, GroupQuestion
from ctl.base.flags import WORKER_ROLES, WorkerRole, flag_arguments
from ctl.local.process_spec import ProcessSpec
from ctl.plan.asking import ask, has_deep_ep
from ctl.plan.layouts import fitting_layout, fullest
from ctl.plan.report import print_plans

# Of a worker, those that change with the layout.
_OF_LAYOUT = ("name", "listen", "metrics-port", "ranks", "device", "gpu-memory-share")


def fits(specs: Sequence[ProcessSpec], gpus: Sequence[Gpu], console: Console) -> bool:
    """Says on the console what does not fit, and what would. ValueError for flags that a worker
    would refuse, NoPlan when nothing can be said."""
    plans = [plan for plan in ask(questions(specs, gpus)) if plan.problem]
    if not plans:
        return True
    print_plans(plans, console)
    found = fitting_layout(_flags(specs), gpus)
    helps = found[0].text() if found else "nothing: ctl plan --nodes says how many it takes"
    console.print(f"What fits these {len(gpus)} GPUs: {helps}", soft_wrap=True)
    return False


def questions(specs: Sequence[ProcessSpec], gpus: Sequence[Gpu]) -> list[GroupQuestion]:
    """One for the workers of a role that are alike."""
    asked: dict[tuple[str, str, Gpu], GroupQuestion] = {}
    for spec in specs:
        role = _role(spec)
        if role is None:
            continue
        first = int(spec.device.partition(":")[2] or 0)
        gpu = fullest(gpus[first : first + spec.num_ranks])
        alike = (role, spec.flags.get("gpu-memory-share", ""), gpu)
        asked.setdefault(
            alike,
            GroupQuestion(
                name=spec.name,
                role=role,
                flags=tuple(flag_arguments(spec.flags)),
                gpu=gpu,
                has_deep_ep=has_deep_ep(),
                # More ranks are a matter of all workers together.
                most_ranks=spec.num_ranks,
                most_nodes=1,
            ),
        )
    return list(asked.values())


def _role(spec: ProcessSpec) -> WorkerRole | None:
    return next((role for role in WORKER_ROLES if role == spec.role), None)


def _flags(specs: Sequence[ProcessSpec]) -> dict[WorkerRole, Mapping[str, str]]:
    """Of each role's first worker, without those of the layout."""
    first = {spec.role: spec for spec in reversed(specs)}
    return {
        role: {"device": "cuda"}
        | {name: value for name, value in first[role].flags.items() if name not in _OF_LAYOUT}
        for role in WORKER_ROLES
    }
