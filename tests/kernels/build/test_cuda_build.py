"""Libraries are built once, whoever asks: with a compiler that notes what it is asked for."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.build import cuda_build

NVCC = """#!/bin/sh
echo "$@" >>"$(dirname "$0")/asked"
sleep 0.3
while [ "$1" != -o ]; do shift; done
grep -q broken "$3" && { echo "line 1: broken" >&2; exit 1; }
cp "$3" "$2"
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a line stands for each call of the compiler."""
    bin_folder = tmp_path / "cuda" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "nvcc").write_text(NVCC)
    (bin_folder / "nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("EPSERVE_CACHE", str(tmp_path / "cache"))
    return bin_folder / "asked"


def test_of_many_at_once_one_builds(tmp_path: Path, asked: Path) -> None:
    source = tmp_path / "some.cu"
    source.write_text("int x;")
    with ThreadPoolExecutor(4) as pool:
        built = set(pool.map(cuda_build.build, [source] * 4))
    assert len(built) == 1
    assert built.pop().read_text() == "int x;"
    assert len(asked.read_text().splitlines()) == 1


def test_a_changed_source_or_header_is_another_library(tmp_path: Path, asked: Path) -> None:
    source, header = tmp_path / "some.cu", tmp_path / "some.cuh"
    source.write_text('#include "some.cuh"\n')
    built = set()
    for text in ("int x;", "int y;", "int x;"):
        header.write_text(text)
        built.add(cuda_build.build(source))
    assert len(built) == len(asked.read_text().splitlines()) == 2


def test_what_cannot_be_built_says_why_and_is_tried_again(tmp_path: Path, asked: Path) -> None:
    source = tmp_path / "some.cu"
    source.write_text("broken")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"nvcc .*some\.cu failed:\nline 1: broken"):
            cuda_build.build(source)
    source.write_text("mended")
    assert cuda_build.build(source).read_text() == "mended"


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, asked: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full or read-only disk costs speed, as a missing compiler does."""
    source = tmp_path / "some.cu"
    source.write_text("int x;")
    (tmp_path / "file").touch()
    monkeypatch.setenv("EPSERVE_CACHE", str(tmp_path / "file" / "cache"))
    assert not cuda_build.is_built(source, "slower")
    assert "slower: " in caplog.text
    assert not asked.exists() or not asked.read_text()
