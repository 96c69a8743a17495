"""`ctl bench`: load on a running server, latencies and throughput."""

import asyncio
import json
import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from core.printable import printable
from ctl.base.output import make_console
from loadgen.load import LoadOptions, Outcome, run_load
from loadgen.records import BenchRun, Record, append
from loadgen.summary import Summary, summarize

_ANSWER_SECONDS = 10.0


def bench(
    url: Annotated[str, typer.Option(help="Base URL of the server")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name; default: the server's first")] = "",
    endpoint: Annotated[
        Literal["completions", "chat"],
        typer.Option(help="completions sends random token ids, chat random words"),
    ] = "completions",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests kept running at once")] = 1,
    request_rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Requests a second, Poisson, instead of a concurrency"),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests in all")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens (chat: words) a prompt")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens a reply")] = 64,
    shared_prefix_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens that all prompts begin with")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds a request may take")] = 600.0,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token")] = "",
    save: Annotated[
        Path | None, typer.Option("--json", help="File to append JSON lines records to")
    ] = None,
) -> None:
    """Measures TTFT, ITL, TPOT, end-to-end time and throughput; fails if a request failed."""
    errors = make_console(stderr=True)
    try:
        options = LoadOptions(
            url=url,
            model=model or served_model(url, api_key),
            endpoint=endpoint,
            concurrency=concurrency,
            request_rate=request_rate,
            num_prompts=num_prompts,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            shared_prefix_tokens=shared_prefix_tokens,
            seed=seed,
            timeout_seconds=timeout,
            api_key=api_key,
        )
        run = BenchRun.begin("ctl bench")
        outcomes, seconds = _run(options, errors)
    except (OSError, HTTPException) as error:
        _fail(errors, _no_answer(url, error), error)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    summary = summarize(outcomes, seconds)
    print_summary(summary, make_console())
    if save is not None:
        try:
            append(save, records(run, options, summary))
        except OSError as error:
            _fail(errors, f"no records in {save}: {error}", error)
    for reason, count in summary.errors.most_common(5):
        errors.print(f"{count} x {printable(reason)}", markup=False, soft_wrap=True)
    if summary.num_errors:
        raise typer.Exit(1)


def _no_answer(url: str, error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        hint = "; --api-key gives a key" if error.code == HTTPStatus.UNAUTHORIZED else ""
        return f"{url} answers {error.code} {error.reason}{hint}"
    return f"no answer from {url}: {str(error).strip() or error!r}"


def _fail(console: Console, problem: str, cause: Exception) -> NoReturn:
    console.print(f"error: {problem}", markup=False, soft_wrap=True)
    raise typer.Exit(1) from cause


def served_model(url: str, api_key: str) -> str:
    """The first model the server names. Raises OSError without an answer (its HTTPError for a
    refusal), HTTPException for one that is not HTTP, ValueError for a strange one."""
    request = urllib.request.Request(url.rstrip("/").removesuffix("/v1") + "/v1/models")
    if api_key:
        request.add_header("authorization", f"Bearer {api_key}")
    with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as reply:
        try:
            return str(json.load(reply)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{url} names no model: {error!r}") from error


def describe_case(options: LoadOptions) -> str:
    """The run in words, for records."""
    if options.request_rate is None:
        load = f"concurrency {options.concurrency}"
    else:
        load = f"{options.request_rate:g} requests/s"
    return (
        f"{options.endpoint}, {load}, {options.num_prompts} requests of "
        f"{options.prompt_tokens} + {options.output_tokens} tokens"
    )


def records(run: BenchRun, options: LoadOptions, summary: Summary) -> list[Record]:
    """The run as records, one a figure."""
    case = describe_case(options)
    return [run.record(case, *figure) for figure in summary.figures()]


def _run(options: LoadOptions, console: Console) -> tuple[list[Outcome], float]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(describe_case(options), total=options.num_prompts)
        return asyncio.run(run_load(options, on_done=lambda _: progress.advance(task)))


def print_summary(summary: Summary, console: Console) -> None:
    """Tables for people: latencies in milliseconds, where any request succeeded."""
    took = f"{summary.num_requests} requests, {summary.num_errors} errors, {summary.seconds:.2f} s"
    if not summary.latencies:
        console.print(took)
        return
    figures = {figure.metric: figure for figure in summary.figures()}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("ms", "mean", "p50", "p90", "p99"):
        table.add_column(title, justify="left" if title == "ms" else "right")
    for name, values in summary.latencies.items():
        table.add_row(name, *(f"{1000 * value:.2f}" for value in values.values()))
    console.print(table)
    console.print(took)
    for metric in ("output_throughput", "prompt_throughput", "request_throughput"):
        figure = figures[metric]
        console.print(f"{metric.replace('_', ' ')}: {figure.value:.1f} {figure.unit}")
