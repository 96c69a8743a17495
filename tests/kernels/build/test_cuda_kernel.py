"""What a launching function is given, and what is raised: one of C instead of CUDA."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.build.cuda_kernel import FLOAT, LONG, NUMBER, POINTER, CudaKernel

NVCC = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
exec cc -shared -fPIC -x c -o "$2" "$3"
"""
SOURCE = """
#include <stdio.h>

const char* some_launch(const int* from, int* to, int count, long long factor, float share,
                        void* stream) {
  static char why[80];
  if (count < 0) {
    snprintf(why, sizeof why, "none on stream %lld", (long long)stream);
    return why;
  }
  for (int i = 0; i < count; ++i) to[i] = (int)(from[i] * (factor >> 32) * share);
  return 0;
}
"""
DEVICE = torch.device("cuda", 1)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaKernel:
    if shutil.which("cc") is None:
        pytest.skip("left out: there is no C compiler")
    compiler = tmp_path / "cuda" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text(NVCC)
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("EPSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "device", {DEVICE: nullcontext()}.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    source = tmp_path / "some.cu"
    source.write_text(SOURCE)
    return CudaKernel(source, POINTER, POINTER, NUMBER, LONG, FLOAT)


def test_arguments_arrive(kernel: CudaKernel) -> None:
    given = torch.arange(5, dtype=torch.int32)
    for _ in range(2):
        out = torch.zeros_like(given)
        kernel.launch(DEVICE, given, out, 4, 6 << 32, 0.5)
        assert out.tolist() == [0, 3, 6, 9, 0]
    assert kernel.is_built("never")


def test_what_is_not_launched_says_why_and_for_which_sizes(kernel: CudaKernel) -> None:
    with pytest.raises(RuntimeError, match=r"^some \(-1, 9, 0\.5\): none on stream 77$"):
        kernel.launch(DEVICE, torch.ones(1), None, -1, 9, 0.5)


def test_a_wrong_number_of_arguments_is_no_launch(kernel: CudaKernel) -> None:
    with pytest.raises(ValueError, match="shorter"):
        kernel.launch(DEVICE, torch.ones(1), None, 1, 9)
