"""`ctl` as its user meets it: options, refusals, exit statuses."""

import json
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ctl.local.up
from core.errors import CheckpointError
from ctl.base.checkpoint import check_model_folder
from ctl.base.ports import free_ports, is_free
from ctl.local.cluster_options import ClusterOptions
from ctl.local.process_spec import ProcessSpec
from ctl.main import app
from tests.tiny_checkpoint import make_tiny_checkpoint

RUNNER = CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_checkpoint(folder)
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[ProcessSpec], ClusterOptions]]:
    """What `ctl up` would run, instead of running it."""
    seen: list[tuple[list[ProcessSpec], ClusterOptions]] = []

    def run(
        specs: Sequence[ProcessSpec], options: ClusterOptions, log_dir: Path, seconds: float
    ) -> int:
        seen.append((list(specs), options))
        return 0

    monkeypatch.setattr(ctl.local.up, "run", run)
    return seen


def two_free_ports() -> int:
    """A port that is free, like the one above it."""
    return next(port for port in free_ports(23000) if is_free(port + 1))


def test_up_starts_what_was_asked_for(
    model: Path, started: list[tuple[list[ProcessSpec], ClusterOptions]]
) -> None:
    port = two_free_ports()
    arguments = (
        f"up --model {model} --port {port} --prefill-workers 2 --prefill-ranks 2 "
        "--decode-workers 2 --decode-ranks 4 --dtype float32 --set decode.max-waiting=3"
    )
    result = RUNNER.invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    ((specs, options),) = started
    assert [spec.name for spec in specs] == [
        "gateway",
        "router",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
    ]
    assert options.served_model_name == "tiny"
    assert specs[-1].flags["max-waiting"] == "3"
    assert specs[-1].flags["ranks"] == "4"
    assert specs[-1].flags["dtype"] == "float32"


def test_up_waits_as_long_as_the_model_is_large(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(ctl.local.up, "run", lambda *arguments: waits.append(arguments[3]) or 0)
    command = ["up", "--model", str(model), "--port", str(two_free_ports())]
    for more in ([], ["--ready-timeout", "7"]):
        assert RUNNER.invoke(app, [*command, *more]).exit_code == 0
    assert 630 < waits[0] < 631
    assert waits[1] == 7


def test_a_port_in_use_is_named_before_anything_starts(
    model: Path, started: list[tuple[list[ProcessSpec], ClusterOptions]]
) -> None:
    port = two_free_ports()
    with socket.create_server(("127.0.0.1", port + 1)):
        result = RUNNER.invoke(app, ["up", "--model", str(model), "--port", str(port)])
    assert result.exit_code == 2
    assert f"port {port + 1} of the router is in use" in result.stderr
    assert started == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--prefill-workers 0", "--prefill-workers"),
        ("--port 80", "--port"),
        ("--device tpu", "--device"),
        ("--set nonsense", "ROLE.FLAG=VALUE"),
        ("--set gateway.listen=1.1.1.1:80", "decided by ctl up"),
        (
            "--set router.max-wating=8 --set decode.chunk-token=1",
            "router: unknown flag --max-wating; the nearest one is --max-waiting; "
            "decode-0: unknown flag --chunk-token; the nearest one is --chunk-tokens",
        ),
        ("--set gateway.tls-cert=cert.pem", "gateway: --tls-cert and --tls-key belong together"),
        ("--set prefill.max-waiting=never", "prefill-0: --max-waiting: Input should be a valid"),
        ("--nonsense", "nonsense"),
    ],
)
def test_wrong_options_are_usage_errors(
    model: Path, started: list[object], arguments: str, reason: str
) -> None:
    port = str(two_free_ports())
    result = RUNNER.invoke(app, ["up", "--model", str(model), "--port", port, *arguments.split()])
    assert result.exit_code == 2
    assert reason in result.stderr
    assert started == []


def test_no_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = RUNNER.invoke(app, ["up", "--model", str(model), "--device", "cuda"])
    assert result.exit_code == 2
    assert "no GPU" in result.stderr


def test_the_tiny_model_is_accepted(model: Path) -> None:
    assert check_model_folder(model).num_layers > 0


def test_made_up_weights_need_no_files(model: Path, tmp_path: Path) -> None:
    folder = broken(model, tmp_path)
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    with pytest.raises(CheckpointError, match="no .*safetensors"):
        check_model_folder(folder)
    assert check_model_folder(folder, with_weights=False).num_layers > 0
    flags = ["up", "--model", str(folder), "--device", "cpu", "--set", "prefill.load-format=dummy"]
    result = RUNNER.invoke(app, flags)
    assert result.exit_code == 2, "decode workers would look for weights"
    assert "safetensors" in result.stderr


def broken(model: Path, tmp_path: Path) -> Path:
    """A copy of the model folder to damage."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_bad_model_folders_are_refused_with_the_reason(model: Path, tmp_path: Path) -> None:
    def reason(folder: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            check_model_folder(folder)
        return caught.value.message

    assert "there is no folder" in reason(tmp_path / "missing")
    assert "is not a folder" in reason(model / "config.json")
    assert "no config.json" in reason(tmp_path)
    folder = broken(model, tmp_path)
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer.json: copy it" in reason(folder)
    for name, content, what in (
        ("tokenizer.model", b"\n\x0e\n\x05<unk>", "tokenizer.model of sentencepiece, which is not"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "but tokenizer.model: have transformers make one"),
        ("tiktoken.model", b"IQ== 0\n", "but tiktoken.model: have transformers make one"),
    ):
        (folder / name).write_bytes(content)
        assert what in reason(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-7.safetensors"}})
    )
    assert "model-7.safetensors is missing" in reason(folder)
    (folder / "model-7.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS" in reason(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "not a safetensors index" in reason(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "llama" in reason(folder)


def test_up_refuses_a_bad_model_folder(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["up", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "no config.json" in result.stderr


def test_without_a_command_the_help_is_shown() -> None:
    result = RUNNER.invoke(app, [])
    assert result.exit_code == 2
    assert all(word in result.output for word in ("up", "status", "bench"))


def test_free_ports_skip_those_in_use() -> None:
    port = two_free_ports()
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)
        assert next(free_ports(port)) > port
    assert is_free(port)
