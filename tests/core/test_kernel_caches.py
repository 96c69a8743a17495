"""Where compiled kernels are kept: by the rules of those who keep them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core import kernel_caches

ROOT = Path(__file__).parents[2]
VARIABLES = (
    "EPSERVE_CACHE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TRITON_HOME", "DG_JIT_CACHE_DIR",
    "DJ_JIT_CACHE_DIR",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/home/me")


def test_by_default_below_the_home_folder() -> None:
    assert kernel_caches.own_kernels() == Path("/home/me/.cache/epserve")
    assert kernel_caches.triton_kernels() == Path("/home/me/.triton/cache")
    assert kernel_caches.deep_gemm_kernels() == Path("/home/me/.dj")


@pytest.mark.parametrize(
    ("variable", "value", "function", "expected"),
    [
        ("EPSERVE_CACHE", "/a", kernel_caches.own_kernels, "/a"),
        ("XDG_CACHE_HOME", "/a", kernel_caches.own_kernels, "/a/epserve"),
        ("TRITON_CACHE_DIR", "/a", kernel_caches.triton_kernels, "/a"),
        ("TRITON_HOME", "/a", kernel_caches.triton_kernels, "/a/.triton/cache"),
        ("DG_JIT_CACHE_DIR", "/a:/read/only", kernel_caches.deep_gemm_kernels, "/a"),
        ("DJ_JIT_CACHE_DIR", "/a", kernel_caches.deep_gemm_kernels, "/a"),
    ],
)
def test_or_where_it_is_told(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, function: object, expected: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert callable(function)
    assert function() == Path(expected)


@pytest.mark.parametrize("variables", [{}, {"TRITON_HOME": "/a"}])
def test_triton_agrees(variables: dict[str, str]) -> None:
    """In a process of its own: Triton looks for its home when it is imported."""
    pytest.importorskip("triton.knobs")
    code = "import triton.knobs, core.kernel_caches as ours; " + (
        "print(triton.knobs.cache.dir, ours.triton_kernels())"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    told = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    theirs, ours = told.split()
    assert theirs == ours
    assert ours.startswith(variables.get("TRITON_HOME", "/home/me"))
