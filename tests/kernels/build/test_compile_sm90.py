"""Every Triton kernel compiles for the GPU that it is meant for, and fits on it.

In a process of its own: this one may have Triton's interpreter on, which cannot be turned off.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Near the limits of shared memory and registers, with instructions of one target.
RISKY = "fp8_gemm dense m4096 n7168"


def run(cache: Path, *arguments: str) -> str:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "bench.compile_offline", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2400, check=False,
    )  # fmt: skip
    # 1: something compiles and does not fit, which is what the caller wants to see.
    assert done.returncode in (0, 1), done.stderr[-4000:]
    return done.stdout


def check(cache: Path, *names: str) -> set[str]:
    """The kernels compiled."""
    kernels = [json.loads(line) for line in run(cache, "--json", *names).splitlines()]
    too_large = [each for each in kernels if not each["fits"]]
    assert not too_large, too_large
    return {each["kernel"] for each in kernels}


def test_a_risky_kernel_fits(tmp_path: Path) -> None:
    assert check(tmp_path, RISKY) == {"_fp8_gemm"}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_all_kernels_fit(tmp_path: Path) -> None:
    compiled = check(tmp_path)
    sources = [
        path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "kernels").glob("*/*_triton.py"))
    ]
    # A kernel is launched as name[grid](...); what others call is compiled as part of them.
    launched = {
        name
        for source in sources
        for name in re.findall(r"@(?:triton|gluon)\.jit(?:\(.*\))?\ndef (\w+)\(", source)
        if f"{name}[" in source
    }
    assert len(launched) > 20
    assert launched <= compiled, launched - compiled
