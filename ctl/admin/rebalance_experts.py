"""`ctl rebalance-experts`: plans, applies and takes back a better placement of experts."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf import json_format
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ctl.admin.connection import AdminConnection, admin_command
from ctl.admin.expert_load import Group, Layers, get_load, parse_layers
from ctl.admin.message_dict import message_dict
from ctl.base.output import Output, make_console, print_json, show
from ctl.base.tables import make_table
from proto import experts_pb2, router_pb2

# Longer than the router waits for the group to plan; one that hangs is told of much earlier.
_PLAN_SECONDS = 65.0
Done = experts_pb2.RebalanceProgress

Plan = Annotated[bool, typer.Option("--plan", help="Only show what would be done (the default)")]
Apply = Annotated[bool, typer.Option("--apply", help="Do it")]
Rollback = Annotated[
    bool, typer.Option("--rollback", help="Back to the placement before the last one")
]
MaxMoves = Annotated[
    int | None, typer.Option(min=0, help="Most experts that may travel, in all layers together")
]
MaxBytes = Annotated[
    int | None, typer.Option(min=0, help="Most bytes that may travel between ranks")
]
Full = Annotated[bool, typer.Option("--full", help="From scratch, whatever has to travel")]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        help="With --apply: what an earlier `--plan --output json` has written",
        show_default=False,
    ),
]
Watch = Annotated[
    bool, typer.Option("--watch", help="Then show the balancedness until interrupted")
]
Interval = Annotated[float, typer.Option(min=0.1, help="With --watch: seconds between two lines")]


@admin_command
async def rebalance_experts(
    admin: AdminConnection,
    plan: Plan = False,
    apply: Apply = False,
    rollback: Rollback = False,
    group: Group = "",
    layers: Layers = "",
    max_moves: MaxMoves = None,
    max_bytes: MaxBytes = None,
    full: Full = False,
    plan_file: PlanFile = None,
    watch: Watch = False,
    interval: Interval = 5.0,
    output: Output = "table",
) -> None:
    """Moves experts between the ranks of a group, so that each has as much to do. Requests go on
    meanwhile, and their answers stay the same."""
    if plan + apply + rollback > 1:
        raise ValueError("--plan, --apply and --rollback exclude each other")
    if plan_file is not None and not apply:
        raise ValueError("--plan-file is for --apply")
    wish = experts_pb2.PlanRequest(
        max_moves=max_moves, max_bytes=max_bytes, layers=parse_layers(layers), full=full
    )
    if rollback:
        request = router_pb2.GroupRollBackRequest(group=group)
        await _follow(admin.stream(admin.stub.RollBackRebalance, request), output)
    elif apply:
        wanted = experts_pb2.ApplyRequest(request=wish)
        if plan_file is not None:
            wanted = experts_pb2.ApplyRequest(plan=read_plan(plan_file))
        order = router_pb2.GroupApplyRequest(group=group, apply=wanted)
        await _follow(admin.stream(admin.stub.ApplyRebalance, order), output)
    else:
        question = router_pb2.GroupPlanRequest(group=group, plan=wish)
        found = await admin.call(admin.stub.PlanRebalance, question, _PLAN_SECONDS)
        show(message_dict(found), output, print_plan)
    if watch:
        await _watch(admin, group, interval, output)


def read_plan(file: Path) -> experts_pb2.RebalancePlan:
    """What `--plan --output json` wrote. Raises ValueError for a file that cannot be read or holds
    no plan."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError("no JSON object")
        return json_format.ParseDict(fields, experts_pb2.RebalancePlan())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except (ValueError, json_format.ParseError) as error:
        raise ValueError(f"{file} holds no plan: {error}") from error


def print_plan(plan: dict[str, Any], console: Console) -> None:
    """What would change and what it costs."""
    before, after = plan["balancedness_before"], plan["balancedness_after"]
    console.print(
        f"{plan['group']}, placement {plan['placement_version']}: balancedness {before:.3f} now, "
        f"{after:.3f} then"
    )
    if not plan["layers"]:
        console.print("nothing to gain by moving experts")
        return
    table = make_table("layer", "now", "then", "moves", right=True)
    for layer in plan["layers"]:
        now, then = layer["balancedness_before"], layer["balancedness_after"]
        table.add_row(str(layer["layer"]), f"{now:.3f}", f"{then:.3f}", str(layer["num_moves"]))
    console.print(table)
    if plan["traffic"]:
        console.print()
        traffic = make_table("from rank", "to rank", "bytes", right=True)
        for pair in plan["traffic"]:
            ranks = str(pair["source"]), str(pair["destination"])
            traffic.add_row(*ranks, decimal(pair["num_bytes"]))
        console.print(traffic)
    console.print(
        f"\n{plan['num_moves']} experts travel, {decimal(plan['num_bytes'])}, about "
        f"{plan['seconds']:.2f} s; --apply does it"
    )


async def _follow(progress: AsyncGenerator[experts_pb2.RebalanceProgress], output: str) -> None:
    """A bar on a terminal while experts move, one line or one JSON object at the end."""
    console = make_console(stderr=True)
    bar = Progress(
        TextColumn("moving experts"),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    last = experts_pb2.RebalanceProgress()
    with bar:
        task = bar.add_task("", words="")
        async for last in progress:
            words = (
                f"{last.num_layers_done} of {last.num_layers} layers, "
                f"{decimal(last.num_bytes_done)} of {decimal(last.num_bytes)}"
            )
            bar.update(task, completed=_done(last), total=1.0, words=words)
    if output == "json":
        told = message_dict(last) | {"num_bytes": last.num_bytes_done}
        keys = ("placement_version", "num_layers", "num_bytes", "seconds", "balancedness")
        print_json({key: told[key] for key in keys})
    else:
        typer.echo(_summary(last))


def _done(progress: experts_pb2.RebalanceProgress) -> float:
    """0 to 1."""
    if progress.phase == Done.PHASE_DONE:
        return 1.0
    layers = progress.num_layers_done / max(1, progress.num_layers)
    return max(layers, min(0.99, progress.num_bytes_done / max(1, progress.num_bytes)))


def _summary(last: experts_pb2.RebalanceProgress) -> str:
    if not last.num_layers:
        return f"nothing to move; placement {last.placement_version} stays in force"
    return (
        f"placement {last.placement_version} is in force: {last.num_layers} layers changed, "
        f"{decimal(last.num_bytes_done)} moved in {last.seconds:.2f} s, "
        f"balancedness {last.balancedness:.3f} expected"
    )


async def _watch(admin: AdminConnection, group: str, interval: float, output: str) -> None:
    """Returns when interrupted, which is how it is to end."""
    try:
        while True:
            _print_line(await get_load(admin, group, []), output)
            await asyncio.sleep(interval)
    except asyncio.CancelledError:
        return


def _print_line(load: dict[str, Any], output: str) -> None:
    if output == "json":
        keys = ("placement_version", "num_tokens", "balancedness")
        typer.echo(json.dumps({"at": round(time.time(), 3), **{key: load[key] for key in keys}}))
        return
    typer.echo(
        f"{time.strftime('%H:%M:%S')}  placement {load['placement_version']}  balancedness "
        f"{load['balancedness']:.3f}  {load['num_tokens']} tokens in {load['window_seconds']:.0f} s"
    )
