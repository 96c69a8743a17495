"""`ctl quantize`: a smaller copy of a checkpoint, its routed experts rounded to int4."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.filesize import decimal
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from ctl.base.output import make_console
from ctl.base.python_process import describe_exit, package_environment

_STOP_SECONDS = 10.0


def quantize(
    model: Annotated[Path, typer.Option(help="Checkpoint folder, BF16 or block FP8")],
    output: Annotated[Path, typer.Option(help="Folder to write; new or empty")],
    format: Annotated[
        Literal["w4afp8"],
        typer.Option(help="Routed experts int4 in groups of 128; all else as it is"),
    ] = "w4afp8",
    resume: Annotated[
        bool, typer.Option("--resume", help="Carry on what was interrupted in the output folder")
    ] = False,
    device: Annotated[
        str, typer.Option(help="auto (GPUs if there are any), cpu, cuda or one, as cuda:1")
    ] = "auto",
    processes: Annotated[
        int | None, typer.Option(min=1, help="At work at once; default: one a core, 8 a GPU")
    ] = None,
) -> None:
    """Writes a copy of a checkpoint whose routed experts are int4, file by file. After an
    interruption of any kind --resume carries on: whole files are verified and kept."""
    command = [
        *(sys.executable, "-m", "model.quantize", "--parent", str(os.getpid())),
        *("--model", str(model), "--output", str(output), "--format", format, "--device", device),
        *(["--resume"] if resume else []),
        *(["--processes", str(processes)] if processes else []),
    ]
    # In a session of its own Ctrl-C reaches only us.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=package_environment(),
        start_new_session=True,
    ) as child:
        # SIGTERM ends it as Ctrl-C does.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            status = _follow(child, output)
        except KeyboardInterrupt:
            typer.echo("interrupted; --resume carries on", err=True)
            status = 1
        finally:
            _stop(child)
    raise typer.Exit(status)


def _follow(child: "subprocess.Popen[str]", output: Path) -> int:
    """Shows what the process tells until it ends; the exit status for ours."""
    console = make_console(stderr=True)
    bar = Progress(
        *Progress.get_default_columns(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    plan: dict[str, Any] = {}
    has_ended, num_written = False, 0
    with bar:
        task = bar.add_task("reading headers", total=None)
        for event in _events(child):
            match event["event"]:
                case "plan":
                    plan = event
                    bar.update(task, total=event["num_bytes"])
                case "progress":
                    bar.update(task, completed=event["num_bytes"])
                case "kept":
                    _say(bar, f"kept {event['shard']}")
                case "shard":
                    num_written += 1
                    left = _time_left(bar)
                    wrote = f"wrote {event['shard']}"
                    _say(bar, f"{wrote}, {num_written} of {plan['num_shards']} files{left}")
                case "done":
                    has_ended = True
                    bar.stop()
                    typer.echo(_summary(event, plan, output))
                case "error":
                    has_ended = True
                    bar.stop()
                    typer.echo(f"error: {event['message']}", err=True)
    status = child.wait()
    if not has_ended:
        ending = f"the process that quantizes ended: {describe_exit(status)}"
        typer.echo(f"error: {ending}; see above, --resume carries on", err=True)
        return 1
    return status


def _say(bar: Progress, text: str) -> None:
    """Beside the bar; where there is none, as a line."""
    bar.update(bar.task_ids[0], description=text)
    if not bar.console.is_terminal:
        typer.echo(text, err=True)


def _time_left(bar: Progress) -> str:
    seconds = bar.tasks[0].time_remaining
    return f", {timedelta(seconds=round(seconds))} left" if seconds else ""


def _events(child: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    assert child.stdout is not None
    for line in child.stdout:
        # A process that is killed may leave half a line.
        with suppress(ValueError):
            yield json.loads(line)


def _summary(done: dict[str, Any], plan: dict[str, Any], output: Path) -> str:
    if done["complete"]:
        return f"{output} is complete already"
    before, after = decimal(plan["num_bytes_source"]), decimal(plan["num_bytes_output"])
    kept = done["num_shards_kept"]
    return (
        f"{output}: {plan['num_matrices']} matrices of experts are int4, {before} became {after} "
        f"in {plan['num_shards'] + kept} files" + (f", {kept} of them from before" if kept else "")
    )


def _stop(child: "subprocess.Popen[str]") -> None:
    child.terminate()
    try:
        child.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
