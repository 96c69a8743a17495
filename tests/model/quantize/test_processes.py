"""Several processes at one checkpoint: the same files as from one, and nothing left when one of
them ends before its time."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from core.errors import CheckpointError
from model.quantize import shard
from model.quantize.__main__ import main
from model.quantize.journal import NAME as JOURNAL
from model.quantize.processes import Processes
from model.quantize.shard import Job
from tests.eventually import eventually
from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("models") / "tiny",
        hidden_size=256,
        moe_intermediate_size=256,
        n_routed_experts=16,
        num_shards=8,
        fp8=True,
        dtype=torch.bfloat16,
    )


def arguments(model: Path, output: Path, *options: str) -> list[str]:
    return ["--model", str(model), "--output", str(output), *options]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def quantise_alone(model: Path, output: Path) -> dict[str, bytes]:
    assert main(arguments(model, output, "--device", "cpu", "--processes", "1")) == 0
    return files_of(output)


def test_the_same_files_from_two(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several pieces a file, which two processes write at once."""
    want = quantise_alone(model, tmp_path / "one")
    monkeypatch.setattr(shard, "PIECE_BYTES", 100_000)
    output = tmp_path / "two"
    assert main(arguments(model, output, "--device", "cpu", "--processes", "2")) == 0
    assert files_of(output) == want


@pytest.mark.gpu
def test_the_same_files_from_a_gpu(model: Path, tmp_path: Path) -> None:
    want = quantise_alone(model, tmp_path / "cpu")
    for processes in ("1", "3"):
        output = tmp_path / processes
        assert main(arguments(model, output, "--device", "cuda", "--processes", processes)) == 0
        assert files_of(output) == want


@contextmanager
def program(model: Path, output: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "model.quantize"]
    command += arguments(model, output, "--device", "cpu", "--processes", "2", "--resume")
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        # Ignored, and so for children, where a shell runs the tests in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as child:
        try:
            yield child
        finally:
            child.kill()  # it may be stopped


def stopped_at_work(child: "subprocess.Popen[str]") -> list[int]:
    """Its two processes; it is stopped itself, so that their files cannot be finished."""
    assert child.stdout is not None
    while json.loads(child.stdout.readline())["event"] != "plan":
        pass
    child.send_signal(signal.SIGSTOP)
    asyncio.run(eventually(lambda: len(workers_of(child)) == 2))
    return workers_of(child)


def workers_of(child: "subprocess.Popen[str]") -> list[int]:
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in cmdline(pid)]


def cmdline(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # What nobody waits for, as in a container without an init, is a zombie.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def check_nothing_is_left(workers: list[int], output: Path) -> None:
    asyncio.run(eventually(lambda: all(is_gone(pid) for pid in workers)))
    assert not list(output.glob("*.partial"))
    assert not (output / "config.json").exists()
    assert (output / JOURNAL).exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_one_that_is_killed_and_the_first_that_is_interrupted(
    model: Path, tmp_path: Path, how: signal.Signals
) -> None:
    output = tmp_path / "out"
    with program(model, output) as child:
        workers = stopped_at_work(child)
        if how == signal.SIGKILL:
            os.kill(workers[0], how)
        else:
            child.send_signal(how)
        child.send_signal(signal.SIGCONT)
        said = child.communicate(timeout=120)[0]
    assert child.returncode == 1
    message = json.loads(said.splitlines()[-1])["message"]
    if how == signal.SIGKILL:
        assert f"process {workers[0]} ended, at model-0000" in message
        assert "signal 9 (SIGKILL); was there too little memory?" in message
    else:
        assert message == "interrupted; --resume carries on"
    check_nothing_is_left(workers, output)
    assert main(arguments(model, output, "--processes", "1", "--resume", "--device", "cpu")) == 0
    assert files_of(output) == quantise_alone(model, tmp_path / "whole")


def test_the_first_that_is_killed(model: Path, tmp_path: Path) -> None:
    """Its processes go with it; what they had begun goes with the next run."""
    output = tmp_path / "out"
    with program(model, output) as child:
        workers = stopped_at_work(child)
        child.kill()
        child.wait()
    asyncio.run(eventually(lambda: all(is_gone(pid) for pid in workers)))
    (output / "model-00008-of-00008.safetensors.partial").touch()
    assert main(arguments(model, output, "--processes", "1", "--resume", "--device", "cpu")) == 0
    assert files_of(output) == quantise_alone(model, tmp_path / "whole")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_file_that_cannot_be_written(model: Path, tmp_path: Path, processes: str) -> None:
    """As on a full disk: the kernel refuses what goes beyond a limit."""
    output = tmp_path / "out"
    options = ("--device", "cpu", "--processes", processes)
    done = subprocess.run(
        [sys.executable, "-m", "model.quantize", *arguments(model, output, *options)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)),  # noqa: PLW1509
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    event = json.loads(done.stdout.splitlines()[-1])
    assert event["event"] == "error"
    assert "File too large" in event["message"]
    assert str(output / "model-0000") in event["message"]
    check_nothing_is_left([], output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "cuda:77"), "--device cuda:77: here there are auto, cpu"),
        (("--device", "tpu"), "--device tpu: here there are auto, cpu"),
        (("--processes", "0"), "--processes 0: has to be at least 1"),
    ],
)
def test_refusals(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    assert main(arguments(model, tmp_path / "out", *options)) == 2
    assert message in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_what_a_device_cannot_do_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here, and in a process whose device is not there."""
    jobs = deque([Job("write", "model-00001-of-00008.safetensors", ("model.norm.weight",))])
    with (
        Processes(model, tmp_path, ["cuda:99"]) as makers,
        pytest.raises(CheckpointError, match=r"on cuda:99[^$]*Error"),
    ):
        next(makers.results(jobs))

    for number, error in enumerate((RuntimeError("no memory left"), KeyError("no memory left"))):
        monkeypatch.setattr(shard, "quantise_int4", Mock(side_effect=error))
        options = ("--device", "cpu", "--processes", "1")
        assert main(arguments(model, tmp_path / str(number), *options)) == 1
        event = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert event["event"] == "error"
        assert "no memory left" in event["message"]
