"""Products of all passes are noted, and shared among the ranks of a machine."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import kernels
from engine import compile_ahead
from engine.compile_ahead import LibraryBuilds, compile_products, noted
from engine.settings import WorkerSettings
from kernels import cuda_build
from kernels.deep_gemm_ahead import Product
from kernels.fp8_gemm_blocks import DENSE
from model.batch import AttentionForm
from model.deepseek import DeepseekV3
from model.dummy_checkpoint import DummyCheckpoint
from tests.model.test_dummy_checkpoint import FP8, config_folder


@pytest.fixture
def model(tmp_path: Path) -> DeepseekV3:
    torch.set_num_threads(1)
    folder = config_folder(tmp_path / "model", FP8)
    source = DummyCheckpoint(folder)
    return DeepseekV3.load(folder, device="cpu", dtype=torch.float32, source=source)


@pytest.mark.parametrize("form", AttentionForm)
def test_all_passes_and_steps_are_run(
    model: DeepseekV3, form: AttentionForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepGEMM, which a CPU never asks, would be asked by all of them."""
    monkeypatch.setitem(sys.modules, "deep_gemm", ModuleType("deep_gemm"))
    monkeypatch.delitem(sys.modules, "kernels.fp8_gemm_deep_gemm", raising=False)
    monkeypatch.delattr(kernels, "fp8_gemm_deep_gemm", raising=False)
    passed: list[int] = []
    decode, forward = DeepseekV3.decode, compile_ahead.pass_lengths

    def counted(self: DeepseekV3, *arguments: object, **named: object) -> object:
        passed.append(-1)
        return decode(self, *arguments, **named)  # type: ignore[arg-type]

    def spied(short: DeepseekV3, *arguments: object) -> None:
        assert len(short.layers) == 2
        passed.extend(arguments[2])  # type: ignore[arg-type]
        forward(short, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DeepseekV3, "decode", counted)
    monkeypatch.setattr(compile_ahead, "pass_lengths", spied)
    assert noted(model, form, [1, 3, 40], [1, 8], 16, 1) == set()
    assert passed == [1, 3, 40, -1, -1]
    sys.modules.pop("kernels.fp8_gemm_deep_gemm", None)
    vars(kernels).pop("fp8_gemm_deep_gemm", None)


def test_ranks_of_a_machine_share_the_work(
    model: DeepseekV3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = {Product(DENSE, 0, 128, 256, rows, 0) for rows in range(1, 8)}
    told: list[list[Product]] = []
    monkeypatch.setattr(compile_ahead, "path_of", lambda *_: "deep_gemm")
    monkeypatch.setattr(compile_ahead, "noted", lambda *_: products)
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda part, *_, **__: told.append(part))
    settings = WorkerSettings(model=tmp_path / "model", ranks=2, nodes=2, rendezvous="a:1")
    met: list[int] = []
    for rank in range(4):
        group = SimpleNamespace(rank=rank, size=4, exchange=met.extend)
        compile_products(model, AttentionForm.PLAIN, settings, group, [1], [])  # type: ignore[arg-type]
    assert told[:2] == told[2:], "the other machine has a cache of its own"
    assert sorted(told[0] + told[1]) == sorted(products)
    assert len(met) == 8, "nobody begins or goes on before all are there"


def test_one_rank_of_a_machine_builds_all_libraries(
    model: DeepseekV3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def build(source: Path) -> Path:
        built.append(source.name)
        if source.name.startswith("w4a8"):
            raise RuntimeError("no nvcc")
        return source

    settings = WorkerSettings(model=tmp_path / "model", ranks=2, nodes=2, rendezvous="a:1")
    monkeypatch.setattr(compile_ahead.cuda_build, "build", build)
    LibraryBuilds(settings, 0, torch.device("cpu")).wait()
    assert not built
    monkeypatch.setattr(compile_ahead, "path_of", lambda *_: "cuda")
    for rank in range(4):
        LibraryBuilds(settings, rank, torch.device("cuda")).wait()
    assert sorted(built) == sorted(2 * [path.name for path in cuda_build.sources()])
    assert "w4a8_grouped_gemm.cu" in built


def test_without_deep_gemm_nothing_is_done(
    model: DeepseekV3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead, "noted", lambda *_: pytest.fail("passes were run"))
    settings = WorkerSettings(model=tmp_path / "model")
    group = SimpleNamespace(rank=0, size=1)
    compile_products(model, AttentionForm.PLAIN, settings, group, [1], [])  # type: ignore[arg-type]
