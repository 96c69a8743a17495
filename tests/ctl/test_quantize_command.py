"""`ctl quantize` as its user meets it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("models") / "tiny",
        hidden_size=256,
        moe_intermediate_size=256,
        n_routed_experts=16,
        num_shards=4,
    )


def command(model: Path, output: Path, *options: str) -> list[str]:
    arguments = ["--model", str(model), "--output", str(output), "--processes", "1"]
    return [sys.executable, "-m", "ctl", "quantize", *arguments, *options]


def run(model: Path, output: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(model, output, *options), capture_output=True, text=True, timeout=240
    )


def interrupt(how: signal.Signals, *command: str) -> tuple[int, str]:
    """Exit status, and what it said, of a command that gets a signal after its first file."""
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    line = child.stderr.readline()
    while line.startswith("kept "):
        line = child.stderr.readline()
    assert line.startswith("wrote model-0000"), line
    child.send_signal(how)
    said = child.stderr.read()  # until also what it had started is gone
    child.stderr.close()
    return child.wait(), said


def test_interrupted_and_carried_on(model: Path, tmp_path: Path) -> None:
    for attempt in range(20):
        output = tmp_path / f"out-{attempt}"
        status, said = interrupt(signal.SIGTERM, *command(model, output))
        if (output / "config.json").exists():
            continue  # it was done before the signal came
        assert (status, "--resume carries on" in said) == (1, True), said
        status, said = interrupt(signal.SIGKILL, *command(model, output, "--resume"))
        if not (output / "config.json").exists():
            break
    assert status == -signal.SIGKILL, said
    assert not (output / "config.json").exists()
    result = run(model, output, "--resume")
    assert result.returncode == 0, result.stderr
    # 2 layers x 16 experts x 3 matrices
    assert f"{output}: 96 matrices of experts are int4" in result.stdout
    assert "in 4 files" in result.stdout
    assert (output / "config.json").is_file()
    assert not list(output.glob("*.partial"))


def test_refusals(model: Path, tmp_path: Path) -> None:
    odd = make_tiny_checkpoint(tmp_path / "odd")
    result = run(odd, tmp_path / "out")
    assert result.returncode == 1
    assert "hidden_size is 64; w4afp8 has scales for groups of 128" in result.stderr
    assert "Traceback" not in result.stderr
    result = run(model, odd)
    assert result.returncode == 2
    assert "is not empty" in result.stderr
