"""What all passes ask for is compiled ahead; products are shared among the ranks of a machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import kernels.gemm
from engine.process.settings import WorkerSettings
from engine.start import compile_ahead
from engine.start.compile_ahead import LibraryBuilds, Passes, asked_for, compile_kernels
from kernels.ahead.deep_gemm_ahead import Product
from kernels.build import cuda_build
from kernels.build.fp8_gemm_blocks import DENSE
from model.batch import AttentionForm, DecodeBatch
from model.deepseek import DeepseekV3
from model.weights.dummy_checkpoint import DummyCheckpoint
from tests.model.weights.test_dummy_checkpoint import FP8, config_folder


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
    monkeypatch.delitem(sys.modules, "kernels.gemm.fp8_gemm_deep_gemm", raising=False)
    monkeypatch.delattr(kernels.gemm, "fp8_gemm_deep_gemm", raising=False)
    passed: list[int] = []
    decode, forward = DeepseekV3.decode, compile_ahead.pass_lengths

    def counted(
        self: DeepseekV3, batch: DecodeBatch, kv_cache: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        passed.append(-len(batch.token_ids))
        assert batch.block_table.shape[1] == 5
        return decode(self, batch, kv_cache, out)

    def spied(short: DeepseekV3, *arguments: object) -> None:
        assert len(short.layers) == 3
        passed.extend(arguments[2])  # type: ignore[arg-type]
        forward(short, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DeepseekV3, "decode", counted)
    monkeypatch.setattr(compile_ahead, "pass_lengths", spied)
    passes = Passes(lengths=[1, 3, 40], sizes=[1, 8], max_pages=5)
    monkeypatch.setattr(compile_ahead, "best_path", lambda *_: "deep_gemm")
    assert asked_for(model, form, passes, 16, 1) == set()
    assert passed == [1, 3, 40, -1, -8]
    sys.modules.pop("kernels.gemm.fp8_gemm_deep_gemm", None)
    vars(kernels.gemm).pop("fp8_gemm_deep_gemm", None)


PASSES = Passes(lengths=[1], sizes=[], max_pages=1)


def test_ranks_of_a_machine_share_the_work(
    model: DeepseekV3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = {Product(DENSE, 0, 128, 256, rows, 0) for rows in range(1, 8)}
    told: list[list[Product]] = []
    under_way: list[bool] = []
    begun: list[bool] = []

    @contextmanager
    def compiled_ahead(*_: object, launched: tuple[str, ...], **__: object) -> Iterator[object]:
        assert "kernels.moe.gate_triton" in launched
        under_way.append(True)
        yield SimpleNamespace(names={"a"}, begin=lambda: begun.append(True))
        assert begun.pop()
        under_way.pop()

    def passes(*_: object) -> set[Product]:
        assert under_way, "what passes launch would be compiled one by one"
        return products

    stand_in = ModuleType("kernels.ahead.triton_ahead")
    stand_in.compiled_ahead = compiled_ahead  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels.ahead.triton_ahead", stand_in)
    monkeypatch.setattr(compile_ahead, "best_path", lambda *_: "triton")
    monkeypatch.setattr(compile_ahead, "asked_for", passes)
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda part, *_, **__: told.append(part))
    settings = WorkerSettings(model=tmp_path / "model", ranks=2, nodes=2, rendezvous="a:1")
    met: list[int] = []
    for rank in range(4):
        group = SimpleNamespace(rank=rank, size=4, exchange=met.extend)
        compile_kernels(model, AttentionForm.PLAIN, settings, group, PASSES)  # type: ignore[arg-type]
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
        if source.name.startswith("fp8"):
            raise OSError("disk is full")
        return source

    settings = WorkerSettings(model=tmp_path / "model", ranks=2, nodes=2, rendezvous="a:1")
    monkeypatch.setattr(compile_ahead.cuda_build, "build", build)
    LibraryBuilds(settings, 0, torch.device("cpu")).wait()
    assert not built
    monkeypatch.setattr(compile_ahead, "best_path", lambda *_: "cuda")
    for rank in range(4):
        LibraryBuilds(settings, rank, torch.device("cuda")).wait()
    assert sorted(built) == sorted(2 * [path.name for path in cuda_build.sources()])
    assert "w4a8_grouped_gemm.cu" in built


def test_a_cpu_compiles_nothing(
    model: DeepseekV3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead, "asked_for", lambda *_: pytest.fail("passes were run"))
    settings = WorkerSettings(model=tmp_path / "model")
    group = SimpleNamespace(rank=0, size=1)
    compile_kernels(model, AttentionForm.PLAIN, settings, group, PASSES)  # type: ignore[arg-type]
