"""Where nvcc is taken from: what the user says, the packages, the machine."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import core.cuda_home
from core.cuda_home import cuda_home, set_cuda_home


def put_nvcc(home: Path) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").touch(mode=0o755)
    return home


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the packages of NVIDIA; the machine has no CUDA."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(variable, "")  # and is what it was when the test is over
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    folder = tmp_path / "site" / "nvidia"
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(core.cuda_home, "find_spec", lambda name: spec)
    return folder


def test_the_extra_brings_one_and_libraries_are_told(packages: Path) -> None:
    (packages / "cudnn").mkdir(parents=True)
    home = put_nvcc(packages / "cu13")
    assert cuda_home() == home
    set_cuda_home()
    assert os.environ["CUDA_HOME"] == str(home)


def test_what_the_user_says_counts_before_all_others(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvcc(packages / "cu13")
    monkeypatch.setenv("CUDA_PATH", str(put_nvcc(tmp_path / "mine")))
    assert cuda_home() == tmp_path / "mine"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "empty"))
    assert cuda_home() == tmp_path / "mine"
