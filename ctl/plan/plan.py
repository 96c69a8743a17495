"""`ctl plan`: the command."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from core.group_plan import Gpu, GroupPlan, GroupQuestion
from ctl.base.flags import WORKER_ROLES, flag_arguments, parse_settings
from ctl.base.options import with_options
from ctl.base.output import Output, make_console, print_json
from ctl.plan.asking import ask, explained_errors
from ctl.plan.cards import CARDS_GIB, card
from ctl.plan.model_folder import model_folder
from ctl.plan.report import print_plans
from ctl.plan.values_file import WorkerValues, alike, read_values

# Flags that say which group it is: --ranks, not --set.
_DECIDED = frozenset({"model", "device", "ranks", "nodes", "node-rank", "rendezvous"})
# Groups of several nodes must have one; nothing goes there.
_RENDEZVOUS = "127.0.0.1:1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Each field is an option of `ctl plan`."""

    gpu: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(CARDS_GIB)}, or the GiB that CUDA tells of one", show_default=False
        ),
    ]
    model: Annotated[
        str,
        typer.Option(
            help="Checkpoint folder, of which config.json is enough; or DeepSeek-V3, V3.1, R1 or "
            "Kimi-K2-Instruct, with -W4AFP8 for int4 experts; default: that of --values",
            show_default=False,
        ),
    ] = ""
    nodes: Annotated[
        int | None,
        typer.Option(min=1, max=512, help="Nodes of a group; default: 1", show_default=False),
    ] = None
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Ranks of a node, one GPU each; default: 8", show_default=False
        ),
    ] = None
    role: Annotated[
        Literal["both", "prefill", "decode"], typer.Option(help="What the group is for")
    ] = "both"
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A flag of a role's workers: ROLE.FLAG=VALUE (prefill.chunk-tokens=4096)",
            show_default=False,
        ),
    ] = None
    values: Annotated[
        Path | None,
        typer.Option(
            help="Values file of the chart, in place of --nodes and --ranks",
            show_default=False,
        ),
    ] = None
    deep_ep: Annotated[bool, typer.Option(help="Whether DeepEP is installed")] = True
    rdma: Annotated[
        bool, typer.Option(help="Whether GPUs can send to other nodes by themselves")
    ] = True
    disk_gbs: Annotated[
        float, typer.Option(min=0.001, help="What a node reads of its weights, GB/s")
    ] = 1.0


@with_options(PlanOptions)
def plan(options: PlanOptions, output: Output = "table") -> None:
    """Says whether a model fits GPUs, by what its ranks would decide at their start. Needs no GPU,
    and no weights.

    Exit status 1 if a group does not fit; then what to change is said, tried before.
    """
    with explained_errors():
        model, groups = _groups(options)
        plans = plans_of(
            options.model or model, options.gpu, groups, deep_ep=options.deep_ep, rdma=options.rdma
        )
    if output == "json":
        print_json([_as_json(each) for each in plans])
    else:
        print_plans(plans, make_console(), options.disk_gbs)
    if any(each.problem for each in plans):
        raise typer.Exit(1)


def _groups(options: PlanOptions) -> tuple[str, list[WorkerValues]]:
    """The model of the values, "" without one, and the groups. ValueError for options that do not
    go together."""
    given = parse_settings(options.settings or ())
    if options.values is None:
        nodes, ranks = options.nodes or 1, options.ranks or 8
        model, groups = "", [alike(role, nodes, ranks) for role in WORKER_ROLES]
    elif options.nodes or options.ranks:
        raise ValueError("--nodes and --ranks are those of --values")
    else:
        model, groups = read_values(options.values)
    return model, [
        replace(group, settings={**group.settings, **given[group.role]})
        for group in groups
        if options.role in (group.role, "both")
    ]


def plans_of(
    model: str, gpu: str, groups: Sequence[WorkerValues], *, deep_ep: bool, rdma: bool
) -> list[GroupPlan]:
    """ValueError for what cannot be asked."""
    on_gpus = [group for group in groups if group.device != "cpu"]
    if not on_gpus:
        raise ValueError("all workers are on cpu: there is nothing to plan")
    if not model:
        raise ValueError("name a model: --model FOLDER")
    with model_folder(model) as folder:
        told = partial(
            _question,
            model=str(folder),
            shown_name=Path(model).name,
            gpu=card(gpu),
            deep_ep=deep_ep,
            rdma=rdma,
        )
        return ask([told(group) for group in on_gpus])


def _question(
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


def _as_json(plan: GroupPlan) -> object:
    return {"fits": not plan.problem, **msgspec.to_builtins(plan)}
