"""Reading with several threads and ahead: the same bytes, in time, no more than is meant to be."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.serving.made_up_checkpoint import write_checkpoint
from core.errors import CheckpointError
from ep.placement.placement import EMPTY
from model.batch import AttentionForm
from model.config import ModelConfig, MtpUse
from model.deepseek import DeepseekV3
from model.weights import file_reader
from model.weights.checkpoint import Checkpoint
from model.weights.file_reader import Reading
from model.weights.load_order import loaded_tensors
from model.weights.read_ahead import ReadAhead, Run
from tests.model.random_folder import make_random_folder
from tests.model.weights.test_dummy_checkpoint import METHODS, config_folder

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reader, "CHUNK_BYTES", 1000)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("small_chunks")
def test_tensors_are_what_safetensors_reads(tmp_path: Path, device: str) -> None:
    """In many chunks, planned or not, in any order."""
    folder = make_random_folder(tmp_path, fp8=True)
    wanted = load_file(folder / "model.safetensors")
    with Checkpoint(folder, device) as checkpoint:
        checkpoint.read_ahead([name for name in wanted if "layers.2" not in name])
        for name in reversed(wanted):
            value = checkpoint.raw(name)
            assert value.device.type == device
            assert value.dtype == wanted[name].dtype
            assert value.shape == wanted[name].shape
            assert torch.equal(value.cpu().view(torch.uint8), wanted[name].view(torch.uint8)), name
        assert checkpoint.bytes_read == sum(value.nbytes for value in wanted.values())
        assert 0 < checkpoint.bytes_planned < checkpoint.bytes_read


def test_single_numbers_and_empty_tensors(tmp_path: Path) -> None:
    tensors = {"one": torch.tensor(2.5), "none": torch.zeros(0, 3), "odd": torch.ones(3).byte()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    for name, value in tensors.items():
        with checkpoint:  # and again after its end
            assert torch.equal(checkpoint.raw(name), value)


@pytest.mark.usefixtures("small_chunks")
def test_a_file_cut_short_after_its_header_was_read(tmp_path: Path) -> None:
    folder = make_random_folder(tmp_path)
    file = folder / "model.safetensors"
    with Checkpoint(folder) as checkpoint:
        os.truncate(file, file.stat().st_size // 2)
        last = max(checkpoint.stored, key=lambda name: checkpoint.stored[name].offsets)
        with pytest.raises(CheckpointError, match=r"model\.safetensors has been cut short"):
            checkpoint.raw(last)


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_random_folder(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with Checkpoint(folder) as checkpoint:
        monkeypatch.setattr(file_reader.os, "preadv", fail)
        with pytest.raises(CheckpointError, match=r"cannot read .*safetensors: Input/output error"):
            checkpoint.raw("lm_head.weight")


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = make_random_folder(tmp_path)
    with Checkpoint(folder) as checkpoint:
        (folder / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"cannot read .*: No such file"):
            checkpoint.raw("lm_head.weight")


class Starts:
    """Readings of ten bytes each that are over at once."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, run: Run) -> Reading:
        self.names.append(run.file.name)
        return Reading(torch.zeros(10, dtype=torch.uint8), ())


def ahead_of(starts: Callable[[Run], Reading], window_bytes: int) -> ReadAhead:
    return ReadAhead(starts, lambda name: Run(Path(name), 0, 10), window_bytes)


def test_no_more_is_read_ahead_than_the_window_holds() -> None:
    starts = Starts()
    ahead = ahead_of(starts, window_bytes=25)
    ahead.plan("abcdefg")
    assert starts.names == []
    ahead.take("a")
    assert starts.names == [*"abc"]
    ahead.take("b")
    assert starts.names == [*"abcd"]


def test_what_is_asked_for_out_of_turn_is_read_once_and_at_once() -> None:
    starts = Starts()
    ahead = ahead_of(starts, window_bytes=20)
    ahead.plan("abcdef")
    for name in "feadxcbx":
        ahead.take(name)
    assert sorted(starts.names) == [*"abcdefxx"]
    assert starts.names.index("e") < 4


def test_experts_are_read_together_where_they_lie_so(tmp_path: Path) -> None:
    """Over a little that nobody wants, but not over much."""
    stem, names = "model.layers.3.mlp.experts", ("down_proj", "gate_proj", "up_proj")
    tensors = {
        f"{stem}.{expert}.{name}.weight{suffix}": torch.full(shape, expert, dtype=dtype)
        for expert in (0, 1, 2)
        for name in names
        for suffix, shape, dtype in (
            ("", (3000, 1), torch.int8), ("_scale_inv", (25, 1), torch.float32)
        )
    }  # fmt: skip
    tensors["norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    started: list[Run] = []
    with Checkpoint(tmp_path) as checkpoint:
        start = checkpoint._start

        def noting(run: Run) -> Reading:
            started.append(run)
            return start(run)

        checkpoint._ahead = ReadAhead(noting, checkpoint._run_of)
        wanted = [name for name in tensors if f"{stem}.1" not in name]
        checkpoint.read_ahead(wanted)
        for name in [*wanted, *reversed(tensors)]:
            assert torch.equal(checkpoint.raw(name), tensors[name]), name
    # Values of either expert, all scales with the few between them, and the norm; then each alone.
    assert [run.num_bytes for run in started[:4]] == [9000, 900, 9000, 12]
    assert len(started) == 4 + len(tensors)


def test_what_fails_while_it_is_read_ahead_fails_who_asks_for_it() -> None:
    failed: Future[None] = Future()
    failed.set_exception(CheckpointError("b is broken"))

    def start(run: Run) -> Reading:
        return Reading(torch.zeros(1), [failed] if run.file.name == "b" else ())

    ahead = ahead_of(start, window_bytes=100)
    ahead.plan("abc")
    ahead.take("a")
    with pytest.raises(CheckpointError, match="b is broken"):
        ahead.take("b")


class Noting(Checkpoint):
    """Which tensors are asked for, in which order, and which were planned."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[str] = []
        self.planned: list[str] = []

    def read_ahead(self, names: Any) -> None:  # noqa: ANN401
        self.planned = list(names)
        super().read_ahead(names)

    def raw(self, name: str) -> torch.Tensor:
        self.asked.append(name)
        return super().raw(name)


@pytest.mark.parametrize("quantization", METHODS)
@pytest.mark.parametrize(("tied", "mtp"), [(False, "none"), (True, "kv"), (False, "whole")])
def test_all_that_is_loaded_is_planned_and_nothing_else(
    tmp_path: Path, quantization: dict[str, Any] | None, tied: bool, mtp: MtpUse
) -> None:
    folder = config_folder(
        tmp_path, quantization, tie_word_embeddings=tied, num_nextn_predict_layers=1
    )
    write_checkpoint(folder, torch.device("cpu"))
    source = Noting(folder)
    DeepseekV3.load(
        folder,
        device="cpu",
        dtype=torch.float32,
        config=replace(ModelConfig.from_folder(folder), mtp=mtp),
        form=AttentionForm.ABSORBED,
        source=source,
    )
    assert sorted(source.planned) == sorted(source.asked)
    # Hardly anything is asked for before its turn: it would not be on its way yet.
    places = [source.planned.index(name) for name in source.asked]
    assert max(place - turn for turn, place in enumerate(places)) < 30


def test_a_rank_reads_its_own_experts_in_the_order_of_its_slots(tmp_path: Path) -> None:
    folder = make_random_folder(tmp_path)
    with Checkpoint(folder) as checkpoint:
        slots = [(5, 3, EMPTY, 5)] * 3
        names = [*loaded_tensors(checkpoint.stored, ModelConfig.from_folder(folder), slots)]
    of_layer = [name for name in names if name.startswith("model.layers.1.mlp.experts")]
    assert of_layer == [
        f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"
        for expert in (5, 3)
        for name in ("gate", "up", "down")
    ]
