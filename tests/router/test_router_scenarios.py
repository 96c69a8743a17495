"""Text scenarios of the whole router without sockets or clock.

Each file under tests/scenarios/router holds commands, `----`, and the trace they cause.
REWRITE_SCENARIOS=1 writes the traces anew; the difference is then for a person to judge.

    prefill NAME EPOCH key=value...   a status arrives (keys of make_status)
    decode NAME EPOCH key=value...
    break NAME                        its stream breaks
    stand NAME open|held|closing      what discovery knows of it
    leave NAME                        discovery names it no more
    advance SECONDS
    assign ID tokens=N [hashes=1,2] [exclude=EPOCH,...] [model=M]
    cancel ID                         the caller goes away
    close                             the router stops
"""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from core.clock import ManualClock
from core.errors import EpserveError
from router.cluster import Cluster
from router.metrics import RouterMetrics
from router.scheduling.demand import Demand
from router.scheduling.pairing import rejections
from router.settings import RouterSettings
from router.workers.table import Left, StatusArrived, Stood, StreamBroken
from router.workers.worker import Standing, Worker
from tests.router.statuses import ROLES, make_status

if TYPE_CHECKING:
    from router.scheduling.assign import Assignment

FOLDER = Path(__file__).resolve().parents[1] / "scenarios" / "router"


class Stage:
    """One cluster under a hand-turned clock; commands in, trace lines out."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        settings = RouterSettings(max_waiting=2, max_wait_seconds=3600)
        self.cluster = Cluster(settings, self.clock, RouterMetrics(CollectorRegistry()))
        self.tasks: dict[str, asyncio.Task[Assignment]] = {}
        self.workers: dict[str, str] = {}

    async def perform(self, line: str) -> list[str]:
        verb, *words = line.split()
        plain = [word for word in words if "=" not in word]
        named = dict(word.split("=", 1) for word in words if "=" in word)
        before = self.table_lines()
        match verb:
            case "prefill" | "decode":
                facts = {
                    key: value if key in ("model", "fingerprint") else int(value)
                    for key, value in named.items()
                }
                status = make_status(verb, plain[1], name=plain[0], **facts)
                self.cluster.apply(StatusArrived(plain[0], ROLES[verb], status))
            case "break":
                self.cluster.apply(StreamBroken(plain[0], "stream broken"))
            case "stand":
                self.cluster.apply(Stood(plain[0], Standing[plain[1].upper()]))
            case "leave":
                self.cluster.apply(Left(plain[0]))
            case "advance":
                self.clock.advance(float(plain[0]))
            case "assign":
                demand = Demand(
                    request_id=plain[0],
                    model=named.get("model", "demo"),
                    num_prompt_tokens=int(named["tokens"]),
                    prefix_hashes=tuple(map(int, _list(named.get("hashes", "")))),
                    excluded=frozenset(_list(named.get("exclude", ""))),
                )
                task = asyncio.create_task(self.cluster.assigner.assign(demand))
                self.tasks[plain[0]] = task
            case "cancel":
                self.tasks[plain[0]].cancel()
            case "close":
                self.cluster.assigner.close()
            case _:
                raise ValueError(f"unknown command {line!r}")
        return [*await self.results(), *self.changes(before)]

    async def results(self) -> list[str]:
        for _ in range(5):  # turns of the loop: all that a call needs to get through
            await asyncio.sleep(0)
        lines = []
        for name, task in list(self.tasks.items()):
            if task.done():
                lines.append(f"{name} {_outcome(task)}")
                del self.tasks[name]
        if self.tasks:
            lines.append(f"waiting: {' '.join(self.tasks)}")
        assert self.cluster.assigner.num_waiting == len(self.tasks)
        return lines

    def table_lines(self) -> dict[str, str]:
        reasons = {r.worker.address: r.reason for r in rejections(self.cluster.table.workers)}
        return {
            worker.address: _describe(worker, reasons.get(worker.address, ""))
            for worker in self.cluster.table.workers
        }

    def changes(self, before: dict[str, str]) -> list[str]:
        after = self.table_lines()
        gone = [f"{name} is forgotten" for name in sorted(before) if name not in after]
        return [*(after[name] for name in sorted(after) if after[name] != before.get(name)), *gone]


def _list(text: str) -> list[str]:
    return [piece for piece in text.split(",") if piece]


def _describe(worker: Worker, rejected: str) -> str:
    line = (
        f"{worker.address} {worker.epoch} {worker.state.value} requests={worker.num_requests}"
        f" pending={len(worker.pending)} tokens={worker.waiting_tokens_per_rank:g}"
        f" pages_free={worker.pages_free}"
    )
    return f"{line}; rejected: {rejected}" if rejected else line


def _outcome(task: "asyncio.Task[Assignment]") -> str:
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    if isinstance(error, EpserveError):
        retry = error.retry_after_seconds
        return f"{error.status.grpc} {error.message}" + (f" [retry {retry:g} s]" if retry else "")
    assignment = task.result()
    pair = assignment.pair
    return (
        f"-> {pair.prefill.name} + {pair.decode.name}"
        f" after {assignment.queue_seconds:g} s, {pair.num_matched_pages} pages matched"
    )


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
async def test_scenario(path: Path) -> None:
    stage = Stage()
    out: list[str] = []
    for block in path.read_text().strip().split("\n\n"):
        commands = block.split("\n----")[0].splitlines()
        trace: list[str] = []
        for command in commands:
            if not command.startswith("#"):
                trace += await stage.perform(command)
        out.append("\n".join([*commands, "----", *trace]))
    for task in stage.tasks.values():
        task.cancel()
    await asyncio.gather(*stage.tasks.values(), return_exceptions=True)
    text = "\n\n".join(out) + "\n"
    if os.environ.get("REWRITE_SCENARIOS"):
        path.write_text(text)
    assert text == path.read_text()


def test_there_are_scenarios() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 5
