"""`ctl expert-load` and `ctl rebalance-experts` through a real router, to a group that says what
the test wants."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import Result
from structlog.testing import capture_logs
from typer.testing import CliRunner

from core.errors import Mismatch, Overloaded, TransferError
from ctl.admin.expert_load import parse_layers
from ctl.admin.heat_map import shares, text_map
from ctl.main import app
from ep.placement.placement import Placement
from proto import experts_pb2
from tests.router.fake_node import LOAD, PLAN, FakeNode
from tests.router.running_router import RunningRouter

RUNNER = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
PATIENCE_SECONDS = 20


@dataclass
class Group:
    """A group and its router, in a thread of their own."""

    node: FakeNode
    router: str

    def ctl(self, *arguments: str) -> Result:
        return RUNNER.invoke(app, [*arguments, "--router", self.router])


@pytest.fixture
def group() -> Iterator[Group]:
    loop = asyncio.new_event_loop()
    stop, up = asyncio.Event(), threading.Event()
    groups: list[Group] = []

    async def serve() -> None:
        async with FakeNode("d-1") as node:
            router = RunningRouter(prefill=(), decode=(node.address,))
            await router.until_ready(node)
            groups.append(Group(node, router.process.address))
            up.set()
            await stop.wait()
            await router.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    with capture_logs():  # stdout is the command's
        thread.start()
        assert up.wait(PATIENCE_SECONDS)
        yield groups[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join()
    loop.close()


def test_load_as_a_table(group: Group) -> None:
    result = group.ctl("expert-load", "--map")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("pool: 4 experts in 2 x 3 slots, placement 3, 100 tokens in 60 s")
    assert " ".join(lines[2].split()) == "1 0.952 1: 47.5% 0: 52.5% 0 x2: 75.0% 1"
    assert lines[3].split() == ["2", "1.000", "-", "-", "-", "4"]
    assert lines[5] == "    1  * -:"  # shares of 3, 0, 0.6 and 0.4


def test_load_as_json_of_some_layers(group: Group) -> None:
    result = group.ctl("expert-load", "--layers", "1-2", "--output", "json", "--group", "pool")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["balancedness"] == 0.976
    assert report["layers"][0]["tokens"] == [150, 0, 30, 20]
    assert report["layers"][0]["rank_tokens"] == [105, 95]
    assert group.node.asked == [experts_pb2.GetLoadRequest(layers=[1, 2])]


def test_heat_map_and_placement_in_files(group: Group, tmp_path: Path) -> None:
    picture, dump = tmp_path / "load.png", tmp_path / "placement.json"
    result = group.ctl("expert-load", "--heat-map", str(picture), "--dump-placement", str(dump))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    placement = Placement.from_json(dump.read_text())
    assert placement.physical_to_logical == ((0, 1, 2, 3, 0, -1),) * 2


def test_plan(group: Group) -> None:
    result = group.ctl("rebalance-experts", "--max-moves", "9", "--layers", "1")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["1", "0.400", "0.800", "1"] in lines
    assert ["0", "1", "2.5", "MB"] in lines
    assert "1 experts travel, 2.5 MB, about 0.25 s" in result.stdout
    assert group.node.asked == [experts_pb2.PlanRequest(max_moves=9, layers=[1])]


def test_a_plan_in_a_file_is_applied(group: Group, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = group.ctl("rebalance-experts", "--plan", "--output", "json")
    file.write_text(result.stdout)
    result = group.ctl("rebalance-experts", "--apply", "--plan-file", str(file))
    assert result.exit_code == 0, result.output
    assert "placement 4 is in force: 1 layers changed, 2.5 MB moved" in result.stdout
    assert group.node.asked[-1] == experts_pb2.ApplyRequest(plan=PLAN)


def test_apply_and_rollback(group: Group) -> None:
    result = group.ctl("rebalance-experts", "--apply", "--full", "-o", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "placement_version": 4,
        "num_layers": 1,
        "num_bytes": 2_500_000,
        "seconds": 0.3,
        "balancedness": 0.9,
    }
    assert group.ctl("rebalance-experts", "--rollback").exit_code == 0
    assert group.node.asked == [
        experts_pb2.ApplyRequest(request=experts_pb2.PlanRequest(full=True)),
        experts_pb2.RollBackRequest(),
    ]


@pytest.mark.parametrize(
    "refusal",
    [
        Overloaded("experts are being moved already"),
        Mismatch("the group is not whole: a rank of it is missing"),
        TransferError("the old placement is in force again: the cable was cut"),
    ],
)
def test_refusals_are_failures(group: Group, refusal: Overloaded) -> None:
    group.node.refusal = refusal
    for action in ("--plan", "--apply", "--rollback"):
        result = group.ctl("rebalance-experts", action)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert refusal.message in result.stderr


def test_unknown_group(group: Group) -> None:
    result = group.ctl("rebalance-experts", "--group", "none-such")
    assert result.exit_code == 1
    assert "no expert group 'none-such'" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--apply", "--rollback"],
        ["--layers", "1,x"],
        ["--layers", "7-3"],
        ["--plan-file", "p.json"],
        ["--apply", "--plan-file", "/none-such.json"],
        ["--max-moves", "-1"],
    ],
)
def test_what_makes_no_sense_is_a_usage_error(arguments: list[str]) -> None:
    assert RUNNER.invoke(app, ["rebalance-experts", *arguments]).exit_code == 2


def test_a_file_that_holds_no_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for text in ("{", "[]", '{"layers": 3}', '{"none_such": 1}'):
        file.write_text(text)
        result = RUNNER.invoke(app, ["rebalance-experts", "--apply", "--plan-file", str(file)])
        assert result.exit_code == 2, text


def test_layers() -> None:
    assert parse_layers("") == []
    assert parse_layers("5, 1-3,2") == [1, 2, 3, 5]


def test_map_folds_experts_into_the_width() -> None:
    rows = shares([(3, [0, 10, 0, 0])])
    assert rows == [(3, [0.0, 4.0, 0.0, 0.0])]
    lines = text_map(rows, 9, colours=False).plain.splitlines()
    assert lines[0] == "    3  # "
    assert LOAD.layers[0].layer == 1
