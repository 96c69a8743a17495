"""How commands say what they found: tables for people, JSON for programs."""

import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import typer
from rich.console import Console

from ctl.base.best_effort_stream import best_effort

# What gRPC's core says on stderr is for its developers. Read when grpc is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

_PLAIN_WIDTH = 4096

Output = Annotated[
    Literal["table", "json"],
    typer.Option("--output", "-o", help="Tables for people, JSON for programs"),
]
Report = TypeVar("Report")


def make_console(*, stderr: bool = False, lasting: bool = False, markup: bool = False) -> Console:
    """A console that does not fold lines when it is no terminal. Without `markup` it shows texts
    as they are: [fd00::1]:9000 looks like rich's.

    A `lasting` one goes on when its terminal or pipe is closed, or its disk full: a cluster is
    not to end because its operator cannot be told of it.
    """
    file = best_effort(sys.stderr if stderr else sys.stdout) if lasting else None
    console = Console(file=file, stderr=stderr, highlight=False, markup=markup)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def show(report: Report, output: str, print_tables: Callable[[Report, Console], None]) -> None:
    """In the form that `--output` asks for; JSON is all there is on stdout then."""
    if output == "json":
        print_json(report)
    else:
        print_tables(report, make_console())


def print_json(report: object) -> None:
    typer.echo(json.dumps(report, indent=2))
