"""`ctl chaos`: faults for a running `ctl up`, to see what its clients notice."""

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from core.printable import printable
from ctl.admin.connection import DEFAULT_ROUTER
from ctl.base.output import make_console
from ctl.chaos.faults import Fault, Kind, make_schedule, read_scenario, write_scenario
from ctl.chaos.injector import Injected, Injector
from ctl.local.own_cluster import OwnCluster


def chaos(
    router: Annotated[
        str, typer.Option(envvar="EPSERVE_ROUTER", help="host:port of a router of the `ctl up`")
    ] = DEFAULT_ROUTER,
    seed: Annotated[int, typer.Option(help="What is drawn follows from it alone")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Faults in all")] = 50,
    rate: Annotated[
        float, typer.Option(min=0.001, help="Faults a second; fewer where they wait for each other")
    ] = 0.5,
    kind: Annotated[
        list[Kind] | None, typer.Option(help="Of this kind; repeated: of these; default: all")
    ] = None,
    scenario: Annotated[
        Path | None, typer.Option(help="File with faults, a line each, in place of drawn ones")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the scenario")] = False,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token")] = "",
) -> None:
    """Kills, stops, cuts off, slows down and starves processes of a `ctl up` of this user on this
    machine, and no others; undoes it, and says what did not recover."""
    console = make_console()
    try:
        injector = Injector.of(OwnCluster.find(router), api_key)
        if scenario is None:
            kinds = kind or list(Kind)
            faults = make_schedule(seed, injector.layout(), count=count, rate=rate, kinds=kinds)
        else:
            faults = read_scenario(scenario.read_text(encoding="utf-8"))
        injector.check(faults)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(printable(str(error))) from error
    if dry_run:
        typer.echo(write_scenario(faults, str(scenario or f"seed {seed}")), nl=False)
        return
    try:
        done = asyncio.run(_run(injector, faults, console))
    except asyncio.CancelledError:
        raise typer.Exit(1) from None
    if failed := sum(bool(one.problem) for one in done):
        console.print(f"{failed} of {len(done)} faults did not end well")
        raise typer.Exit(1)


async def _run(injector: Injector, faults: Sequence[Fault], console: Console) -> list[Injected]:
    """CancelledError after a signal that ends the command: once everything is undone."""
    running = asyncio.create_task(injector.run(faults, lambda one: _say(one, console)))
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    return await running


def _say(one: Injected, console: Console) -> None:
    took = f"{one.began:.1f} to {one.over:.1f} s"
    end = f": {printable(one.problem)}" if one.problem else ""
    console.print(f"{one.fault} ({took}){end}", soft_wrap=True)
