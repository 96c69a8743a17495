"""`ctl plan` as its user meets it, `ctl up` and `ctl doctor` with a plan in front."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import ctl.local.up
import ctl.plan.asking
from ctl.base.checkpoint import demo_model_folder
from ctl.base.host import Host
from ctl.doctor.fit_check import check_fit
from ctl.main import app
from ctl.plan.asking import NoPlan, ask
from ctl.plan.cards import CARDS_GIB, GIB, card, own_cards
from ctl.plan.values_file import DEFAULTS
from model.known_models import WeightFormat, full_size_config
from tests.ctl.plan.page_commands import REPOSITORY
from tests.ctl.plan.planning_here import plan_here

RUNNER = CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_here(monkeypatch)


def planned(*arguments: str, status: int = 0) -> list[dict[str, Any]]:
    result = RUNNER.invoke(app, ["plan", *arguments, "--output", "json"])
    assert result.exit_code == status, result.output
    plans: list[dict[str, Any]] = json.loads(result.stdout)
    return plans


def test_the_process_answers_for_both_roles() -> None:
    prefill, decode = planned("--model", "DeepSeek-R1-W4AFP8", "--gpu", "h200", "--ranks", "4")
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    assert prefill["fits"]
    assert prefill["model_format"] == "w4afp8"
    assert not prefill["from_headers"]
    assert prefill["slots"] == decode["slots"] == 64
    assert prefill["dispatcher"] == "deep_ep"
    used = sum(term["num_bytes"] for term in decode["terms"])
    assert 0.9 * decode["memory_bytes"] < used <= decode["memory_bytes"] == int(139.7 * GIB)
    assert decode["kv_tokens"] == decode["kv_pages"] * decode["page_tokens"] > 163840


@pytest.mark.usefixtures("_here")
def test_what_does_not_fit_ends_with_what_would() -> None:
    options = ("--model", "DeepSeek-V3", "--gpu", "h100", "--role", "decode")
    (plan,) = planned(*options, status=1)
    assert not plan["fits"]
    assert "weights: routed experts" in plan["problem"]
    assert [each["change"] for each in plan["advice"]] == [
        "a w4afp8 checkpoint (ctl quantize)",
        "nodes 2 (now 1)",
    ]
    (larger,) = planned(*options, "--nodes", "2")
    assert larger["kv_tokens"] == plan["advice"][1]["kv_tokens"]


@pytest.mark.usefixtures("_here")
def test_what_cannot_be_had_is_a_problem_without_a_table() -> None:
    options = ("--model", "DeepSeek-V3", "--gpu", "h200", "--no-deep-ep", "--role", "decode")
    wanted = "--set=decode.ep-dispatcher=deep_ep"
    result = RUNNER.invoke(app, ["plan", *options, wanted])
    assert result.exit_code == 1
    assert "cannot start: ep-dispatcher deep_ep cannot be had: it is not installed" in result.stdout
    (plan,) = planned(*options)
    assert plan["dispatcher"] == "collective"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--model DeepSeek-V3", "Missing option '--gpu'"),
        ("--model DeepSeek-V3 --gpu b300", "h100, h100-nvl, h200"),
        ("--model DeepSeek-V3 --gpu 0.5", "no GPU has 0.5 GiB"),
        ("--gpu h200", "name a model"),
        ("--gpu h200 --model Qwen3-30B", "by name only DeepSeek-V3"),
        ("--gpu h200 --model DeepSeek-V3.2", "by name only DeepSeek-V3"),
        ("--gpu h200 --model DeepSeek-V3 --set chunk-tokens=1", "is not ROLE.FLAG=VALUE"),
        ("--gpu h200 --model DeepSeek-V3 --set decode.ranks=4", "decode.ranks is decided by"),
        ("--gpu h200 --model DeepSeek-V3 --values no.yaml", "no.yaml: No such file"),
        ("--gpu h200 --values no.yaml --nodes 2", "--nodes and --ranks are those of --values"),
    ],
)
def test_wrong_options_are_usage_errors(arguments: str, reason: str) -> None:
    result = RUNNER.invoke(app, ["plan", *arguments.split()])
    assert result.exit_code == 2
    assert reason in result.stderr


def test_what_a_worker_refuses_is_said_as_it_says_it(tmp_path: Path) -> None:
    model = dummy_model(tmp_path / "v3", "fp8")
    (model / "model.safetensors").write_bytes(b"cut")
    for options, reason in (
        (
            "--model DeepSeek-V3 --set prefill.chunk-tokenz=9",
            "--chunk-tokenz; the nearest one is --chunk-tokens",
        ),
        ("--model DeepSeek-V3 --set prefill.chunk-tokens=3", "chunk-tokens 3 is less than a page"),
        (f"--model {model}", "model.safetensors is cut short"),
    ):
        result = RUNNER.invoke(app, ["plan", "--gpu", "h200", *options.split()])
        assert result.exit_code == 2
        assert reason in result.stderr


def test_a_process_that_fails_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctl.plan.asking.sys, "executable", "/bin/false")
    with pytest.raises(NoPlan, match="ended: exit status 1"):
        ask([])
    result = RUNNER.invoke(app, ["plan", "--model", "DeepSeek-V3", "--gpu", "h200"])
    assert result.exit_code == 1
    assert "the process that plans ended" in result.stderr


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ("model: {path: DeepSeek-V3}", "all workers are on cpu"),
        ("[1, 2]", "no values of the chart"),
        ("a: [", "is not YAML"),
        ("workers: {common: 3}", "common is no object"),
        ("workers: {common: {device: cuda, ranks: many}}", "workers.prefill.ranks is 'many'"),
        ("workers: {common: {device: cuda}}", "name a model"),
    ],
)
def test_values_that_cannot_be_planned(tmp_path: Path, values: str, reason: str) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(values)
    result = RUNNER.invoke(app, ["plan", "--values", str(file), "--gpu", "h200"])
    assert result.exit_code == 2
    assert reason in result.stderr.replace("\n", " ")


@pytest.mark.usefixtures("_here")
def test_values_of_a_role_have_the_last_word(tmp_path: Path) -> None:
    common = {"device": "cuda", "ranks": 8, "nodes": 2, "settings": {"kv-memory-fraction": 0.5}}
    own = {"nodes": 4, "settings": {"max-running": 8, "cuda-graph": False}}
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"workers": {"common": common, "decode": own}}))
    prefill, decode = planned("--values", str(file), "--model", "DeepSeek-V3", "--gpu", "h200")
    assert (prefill["nodes"], decode["nodes"]) == (2, 4)
    assert decode["max_running"] == 8
    assert "CUDA graphs" not in [term["name"] for term in decode["terms"]]
    options = ("--model", "DeepSeek-V3", "--gpu", "h200", "--set", "decode.max-running=4")
    (decode,) = planned("--values", str(file), "--role", "decode", *options)
    assert decode["max_running"] == 4


def test_defaults_are_those_of_the_chart() -> None:
    chart = REPOSITORY / "deploy" / "helm" / "epserve" / "values.yaml"
    common = yaml.safe_load(chart.read_text(encoding="utf-8"))["workers"]["common"]
    assert {name: common[name] for name in DEFAULTS} == DEFAULTS


def test_cards() -> None:
    assert card("H200").total_bytes == int(CARDS_GIB["h200"] * GIB)
    assert card("44.5GiB").free_bytes == int(44.5 * GIB)


SMI = """#!/bin/sh
for index in $(seq {count}); do
  case "$1" in
    -L) echo "GPU $index: {name}" ;;
    --query-gpu=*) echo "{name}, {total}, {reserved}, {free}, {capability}" ;;
  esac
done
"""


class Machine:
    """Its driver says what it has, as nvidia-smi prints it (an H200: 143,771 MiB)."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._smi = folder / "nvidia-smi"
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def has(self, count: int, **told: object) -> None:
        card = {
            "name": "NVIDIA H200", "total": 143771, "reserved": 604, "free": 143167,
            "capability": 9.0,
        }  # fmt: skip
        self._smi.write_text(SMI.format(count=count, **(card | told)))
        self._smi.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_cards_of_this_machine(machine: Machine) -> None:
    machine.has(2, free=100000)
    first, _ = own_cards(Host(), None)
    assert first.name == "H200"
    assert first.total_bytes / GIB == pytest.approx(139.81, abs=0.01)
    assert first.free_bytes == 100000 << 20
    machine.has(1, name="NVIDIA A100", capability=8.0)
    assert not own_cards(Host(), None)[0].is_hopper
    machine.has(1, total="[N/A]")
    assert own_cards(Host(), None) == []


def dummy_model(folder: Path, weights: WeightFormat) -> Path:
    """With all that `ctl up` looks for."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(full_size_config(weights)))
    (folder / "tokenizer.json").write_bytes((demo_model_folder() / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[object]]:
    """What `ctl up` would run, instead of running it."""
    seen: list[Sequence[object]] = []

    def run(specs: Sequence[object], *_: object) -> int:
        seen.append(specs)
        return 0

    monkeypatch.setattr(ctl.local.up, "run", run)
    monkeypatch.setattr(ctl.local.up, "is_free", lambda port: True)
    return seen


def up(model: Path, *options: str) -> Any:
    dummy = [f"--set={role}.load-format=dummy" for role in ("prefill", "decode")]
    options = ("--model", str(model), "--device", "cuda", *dummy, *options)
    return RUNNER.invoke(app, ["up", *options])


@pytest.mark.usefixtures("_here")
def test_up_refuses_what_does_not_fit_and_says_what_does(
    tmp_path: Path, machine: Machine, started: list[Sequence[object]]
) -> None:
    machine.has(8)
    refused = up(dummy_model(tmp_path / "v3", "fp8"), "--decode-workers", "2")
    assert refused.exit_code == 1
    assert not started
    assert "prefill-0: 1 rank on H200, v3 (fp8): does not fit" in refused.stderr
    assert "decode-0: 2 ranks on H200" in refused.stderr
    assert "decode-1" not in refused.stderr, "as decode-0"
    layout = "--prefill-workers 1 --prefill-ranks 4 --decode-workers 1 --decode-ranks 4"
    assert f"fits these 8 GPUs: {layout} and a w4afp8 checkpoint" in refused.stderr

    model = dummy_model(tmp_path / "v3-w4afp8", "w4afp8")
    accepted = up(model, *layout.split())
    assert accepted.exit_code == 0, accepted.output
    assert len(started) == 1


@pytest.mark.usefixtures("_here")
def test_up_counts_what_others_hold_and_asks_nobody_who_does_not_tell(
    tmp_path: Path, machine: Machine, started: list[Sequence[object]]
) -> None:
    model = dummy_model(tmp_path / "v3-w4afp8", "w4afp8")
    options = ("--prefill-ranks", "4", "--decode-ranks", "4")
    machine.has(8, free=70000)
    refused = up(model, *options)
    assert refused.exit_code == 1
    assert "What fits these 8 GPUs: nothing" in refused.stderr
    machine.has(8, free="[N/A]")
    assert up(model, *options).exit_code == 0
    assert len(started) == 1


@pytest.mark.usefixtures("_here")
def test_doctor_says_how_a_model_fits(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8, int4 = (dummy_model(tmp_path / name, name) for name in ("fp8", "w4afp8"))  # type: ignore[arg-type]
    machine.has(8)
    too_large = check_fit(Host(), fp8)
    assert too_large.state == "warning"
    assert "ctl quantize" in too_large.advice
    fitting = check_fit(Host(), int4)
    assert fitting.state == "ok"
    assert "--prefill-ranks 4" in fitting.detail
    machine.has(2)
    assert "not on these 2 GPUs" in check_fit(Host(), int4).detail
    monkeypatch.setenv("PATH", "/nowhere")
    assert check_fit(Host(), int4).state == "note"
