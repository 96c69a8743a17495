"""What our pages and examples would start fits the GPUs that they name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.utils import parse_quantity
from typer.testing import CliRunner

import ctl.local.up
from core.group_plan import Gpu, GroupPlan, GroupQuestion
from ctl.main import app
from ctl.plan.cards import card as card_of
from ctl.plan.model_folder import model_folder
from ctl.plan.plan import plans_of
from ctl.plan.values_file import read_values
from engine.planning.answer import answer
from scripts.plan_examples import with_outputs
from tests.ctl.plan.page_commands import EXAMPLES, Card, Command, card_in, commands, pages
from tests.ctl.plan.planning_here import plan_here

RUNNER = CliRunner()
# Files of an operator's machine.
NOT_HERE = ("--admin-token-file", "--expert-placement")
COMMANDS = [each for page in pages() for each in commands(page, page.read_text(encoding="utf-8"))]
ON_GPUS = [
    path
    for path in sorted(EXAMPLES.glob("values-*.yaml"))
    if "device: cuda" in path.read_text(encoding="utf-8")
]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The token is in the environment, as pages say it to those who start workers by hand."""
    plan_here(monkeypatch)
    token = tmp_path / "cluster-token"
    token.write_text("of-this-test")
    monkeypatch.setenv("EPSERVE_CLUSTER_TOKEN_FILE", str(token))


def named(card: Card | None, where: object) -> Card:
    assert card is not None, f"{where}: say for which GPUs"
    return card


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_an_example_fits_its_gpus_and_asks_for_what_its_nodes_need(path: Path) -> None:
    card = named(card_in(path.read_text(encoding="utf-8")), path.name)
    model, groups = read_values(path)
    for plan in plans_of(model, card.name, groups, deep_ep=True, rdma=True):
        assert not plan.problem, (plan.problem, plan.advice)
        check_pod(path.with_name(path.name.replace("values-", "output-")), plan)


def check_pod(output: Path, plan: GroupPlan) -> None:
    """Of what the example renders to: as many ranks, and no less of the node than is needed."""
    pods = [pod for pod in pods_of(output) if f"--ranks={plan.ranks}" in args_of(pod)]
    pods = [pod for pod in pods if f"{plan.role}_worker" in pod["containers"][0]["command"]]
    assert pods
    assert plan.host is not None
    for pod in pods:
        resources = pod["containers"][0]["resources"]
        assert parse_quantity(resources["requests"]["cpu"]) >= plan.host.cpus
        assert parse_quantity(resources["requests"]["memory"]) >= plan.host.memory_bytes
        mounted = [each["emptyDir"] for each in pod["volumes"] if each["name"] == "shm"]
        assert mounted or pod.get("hostIPC")
        for shared in mounted:
            assert parse_quantity(shared["sizeLimit"]) >= plan.host.shared_memory_bytes


def pods_of(output: Path) -> list[Mapping[str, Any]]:
    """Specs of pods, wherever they are in the objects."""

    def below(value: object) -> list[Mapping[str, Any]]:
        if isinstance(value, list):
            return [pod for each in value for pod in below(each)]
        if not isinstance(value, dict):
            return []
        own = [value] if "containers" in value else []
        return own + [pod for each in value.values() for pod in below(each)]

    return below(list(yaml.safe_load_all(output.read_text(encoding="utf-8"))))


def args_of(pod: Mapping[str, Any]) -> list[str]:
    return list(pod["containers"][0].get("args", ()))


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_fits_its_gpus(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    if command.program == "plan":
        check_plan(command)
    elif command.program == "up":
        check_up(command, monkeypatch)
    else:
        check_worker(command)


def check_plan(command: Command) -> None:
    """One that is shown may say that something does not fit."""
    result = RUNNER.invoke(app, ["plan", *command.arguments])
    assert result.exit_code <= command.is_shown, result.output


def check_up(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    card = named(command.card, command)
    assert card.count, f"{command}: say how many GPUs"
    gpus: list[Gpu] = [card_of(card.name)] * card.count
    started: list[int] = []
    monkeypatch.setattr(ctl.local.up, "count_gpus", lambda: card.count)
    monkeypatch.setattr(ctl.local.up, "own_cards", lambda host, visible: gpus)
    monkeypatch.setattr(ctl.local.up, "is_free", lambda port: True)
    monkeypatch.setattr(ctl.local.up, "check_model_folder", lambda folder, with_weights: None)
    monkeypatch.setattr(ctl.local.up, "run", lambda *_: started.append(1) or 0)
    with model_folder(option(command, "--model")) as folder:
        arguments = with_option(command, "--model", str(folder))
        result = RUNNER.invoke(app, ["up", *arguments])
    assert result.exit_code == 0, result.output
    assert started


def check_worker(command: Command) -> None:
    card = named(command.card, command)
    with model_folder(option(command, "--model")) as folder:
        question = GroupQuestion(
            name=command.program,
            role="prefill" if command.program == "prefill" else "decode",
            flags=with_option(command, "--model", str(folder)),
            gpu=card_of(card.name),
        )
        plan = answer(question)
    assert not plan.problem, (plan.problem, plan.advice)


def option(command: Command, name: str) -> str:
    words = " ".join(command.arguments).replace("=", " ").split()
    return words[words.index(name) + 1]


def with_option(command: Command, name: str, value: str) -> tuple[str, ...]:
    """The arguments with another value of an option, and without files that are not here."""
    words = [
        part
        for word in command.arguments
        for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    for absent in NOT_HERE:
        if absent in words:
            del words[words.index(absent) : words.index(absent) + 2]
    words[words.index(name) + 1] = value
    return tuple(words)


def test_pages_show_what_the_command_prints() -> None:
    showing = [page for page in pages() if "\n$ ctl plan" in page.read_text(encoding="utf-8")]
    assert showing
    for page in showing:
        text = page.read_text(encoding="utf-8")
        assert with_outputs(text) == text, "stale: make docs"


PAGE = """
Nodes of 8 H100.
```sh
ctl up --device cuda --model /m/A --port 9   # on eight H200
make up UP_ARGS="--device cuda --prefill-ranks 4"
```
```
docker run --gpus all epserve:1-cuda decode --device=cuda --ranks 8 \\
  --rendezvous $NODE:9400
ctl up --model demo
```
"""


def test_new_commands_are_found() -> None:
    found = list(commands(Path("page.md"), PAGE))
    assert [(each.program, each.card) for each in found] == [
        ("up", Card("h200", 8)),
        ("up", Card("h200", 8)),
        ("decode", Card("h200", 8)),
    ]
    assert found[2].arguments[-2:] == ("--rendezvous", "10.0.0.1:9400")
    assert list(commands(Path("page.md"), "```\nctl up --device cuda\n```"))[0].card is None


def test_our_pages_start_workers_on_gpus() -> None:
    assert {each.program for each in COMMANDS} >= {"plan", "up", "prefill", "decode"}
    assert len(ON_GPUS) >= 4
