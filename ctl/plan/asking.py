"""Asks the process that plans."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import msgspec
import typer

from core.errors import CheckpointError
from core.group_plan import GroupPlan, GroupQuestion
from ctl.base.python_process import describe_exit, package_environment

_BAD_FLAGS = 2


class NoPlan(Exception):
    """Why there is none, in lines."""


@contextmanager
def explained_errors() -> Iterator[None]:
    """What is wrong with a model or an option, or why there is no plan, becomes words on stderr
    and an exit status."""
    try:
        yield
    except CheckpointError as error:
        raise typer.BadParameter(error.message, param_hint="--model") from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except NoPlan as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def ask(questions: Sequence[GroupQuestion]) -> list[GroupPlan]:
    """An answer each. ValueError for flags that a worker would refuse, NoPlan when the process
    fails."""
    done = subprocess.run(
        [sys.executable, "-m", "engine.planning"],
        input=msgspec.json.encode(questions),
        capture_output=True,
        env=package_environment(),
    )
    told = done.stderr.decode(errors="replace").strip()
    if done.returncode == _BAD_FLAGS:
        raise ValueError(reason(told))
    if done.returncode:
        raise NoPlan(f"the process that plans ended: {describe_exit(done.returncode)}\n{told}")
    return msgspec.json.decode(done.stdout, type=list[GroupPlan])


def has_deep_ep() -> bool:
    """Whether workers that are started here would find it; not whether it can be imported."""
    return find_spec("deep_ep") is not None


def reason(told: str) -> str:
    """Of a process that refuses its flags: without how it may be used."""
    lines = told.strip().splitlines()
    if lines and lines[0].startswith("usage:"):
        lines = lines[-1:]
    return "; ".join(line.partition("error: ")[2] or line for line in lines)
