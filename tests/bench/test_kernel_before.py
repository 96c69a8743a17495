"""The kernel as it was, as far as that goes without a GPU: where its sources come from."""

import subprocess
from pathlib import Path

import pytest
import torch

from bench import kernels_w4a8
from bench.kernel_before import at_revision, launched
from kernels.build.cuda_kernel import CudaKernel
from kernels.moe import w4a8_grouped_gemm_cuda as w4a8

ROOT = Path(__file__).parents[2]


def test_sources_are_those_of_the_revision(tmp_path: Path) -> None:
    at_revision("HEAD", tmp_path)
    found = sorted(path.name for path in (tmp_path / "kernels").iterdir())
    assert "w4a8_grouped_gemm.cu" in found
    assert not [name for name in found if not name.endswith((".cu", ".cuh"))]
    for name in found:
        wanted = subprocess.run(
            ("git", "show", f"HEAD:kernels/{name}"), cwd=ROOT, capture_output=True, check=True
        ).stdout
        assert (tmp_path / "kernels" / name).read_bytes() == wanted


def test_a_revision_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="git does not give never"):
        at_revision("never", tmp_path)


def test_a_revision_that_there_is_not_is_a_wrong_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit) as ended:
        kernels_w4a8.main(["--before", "never"])
    assert ended.value.code == 2
    assert "git does not give never" in capsys.readouterr().err


def test_the_other_kernel_is_launched_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[CudaKernel] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda kernel, *_: seen.append(kernel))
    other = w4a8.KERNEL.of(ROOT / "other.cu")

    def launch() -> None:
        w4a8.launch(
            torch.zeros(1, 4, 128),
            torch.ones(1, 4, 1),
            (4, 1, 1),
            torch.zeros(1, 1, 1, 8704, dtype=torch.uint8),
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, 4, 128),
            capacity=4,
            expected_rows=4,
        )

    with launched(other):
        launch()
    launch()
    assert seen == [other, w4a8.KERNEL]
