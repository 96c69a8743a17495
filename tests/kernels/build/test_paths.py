"""Which path an operation takes."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kernels.build import paths
from kernels.build.paths import OPERATIONS, path_of


def test_a_cpu_has_the_references() -> None:
    assert {path_of(operation, torch.device("cpu")) for operation in OPERATIONS} == {"reference"}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    paths._best_path.cache_clear()
    monkeypatch.setattr(paths, "_is_installed", paths._is_installed.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    monkeypatch.setattr(paths, "cuda_home", lambda: Path("/cuda"))
    monkeypatch.delenv("EPSERVE_KERNELS", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"deep_gemm", "triton"}, "deep_gemm"),
        ({"triton"}, "triton"),
        ({"deep_gemm"}, "deep_gemm"),
        (set(), "reference"),
    ],
)
def test_the_best_that_is_installed(
    hopper: pytest.MonkeyPatch, installed: set[str], expected: str
) -> None:
    hopper.setattr(paths, "find_spec", lambda name: name if name in installed else None)
    assert path_of("fp8_gemm", torch.device("cuda")) == expected
    paths._best_path.cache_clear()


def test_deep_gemm_is_left_out_where_it_cannot_compile(
    hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hopper.setattr(paths, "find_spec", lambda name: name)
    hopper.setattr(paths, "cuda_home", lambda: None)
    assert path_of("fp8_gemm", torch.device("cuda")) == "triton"
    assert "nvcc, which pip install 'epserve[gpu]' brings" in caplog.text
    paths._best_path.cache_clear()


def test_what_we_compile_ourselves_needs_no_package(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(paths, "find_spec", lambda name: None)
    assert path_of("w4a8_grouped_gemm", torch.device("cuda")) == "cuda"
    paths._best_path.cache_clear()


def test_another_gpu_has_what_runs_everywhere(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda index: (8, index))
    hopper.setattr(paths, "find_spec", find_spec)
    assert path_of("fp8_gemm", torch.device("cuda")) == "triton"
    assert path_of("w4a8_grouped_gemm", torch.device("cuda")) == "reference"
    paths._best_path.cache_clear()


def test_references_can_be_asked_for(hopper: pytest.MonkeyPatch) -> None:
    hopper.setenv("EPSERVE_KERNELS", "reference")
    assert {path_of(operation, torch.device("cuda")) for operation in OPERATIONS} == {"reference"}
    paths._best_path.cache_clear()


def test_unknown_operations_are_a_mistake() -> None:
    with pytest.raises(KeyError):
        path_of("nothing", torch.device("cpu"))


def test_what_was_taken_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_noted", {})
    path_of("rms_norm", torch.device("cpu"))
    assert paths.best_path("gate", torch.device("cpu")) == "reference", "asked, not taken"
    assert paths.note("mla_decode", "flash_mla") == "flash_mla"
    paths.note("mla_decode", "cuda")
    assert paths.noted() == {"mla_decode": "cuda+flash_mla", "rms_norm": "reference"}
