"""The kernel as it was, as far as that goes without a GPU: where its sources come from."""

import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from bench import kernel_before, kernels_w4a8
from bench.kernel_before import at_revision, launched
from kernels.build.cuda_kernel import CudaKernel
from kernels.moe import w4a8_grouped_gemm_cuda as w4a8

ROOT = Path(__file__).parents[2]


def test_sources_are_those_of_the_revision(tmp_path: Path) -> None:
    at_revision("HEAD", tmp_path)
    found = sorted(path for path in (tmp_path / "kernels").rglob("*") if path.is_file())
    assert "w4a8_grouped_gemm.cu" in [path.name for path in found]
    assert not [path for path in found if path.suffix not in (".cu", ".cuh")]
    for path in found:
        wanted = subprocess.run(
            ("git", "show", f"HEAD:{path.relative_to(tmp_path)}"),
            cwd=ROOT, capture_output=True, check=True,
        ).stdout  # fmt: skip
        assert path.read_bytes() == wanted


def test_a_revision_from_before_there_were_rooms(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(("git", "-C", str(tmp_path), *words), capture_output=True, check=True)

    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "w4a8_grouped_gemm.cu").write_text("// flat")
    git("init")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "flat")
    with patch.object(kernel_before, "_ROOT", tmp_path):
        at_revision("HEAD", tmp_path / "out")
    assert (tmp_path / "out" / "kernels" / "w4a8_grouped_gemm.cu").read_text() == "// flat"


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
