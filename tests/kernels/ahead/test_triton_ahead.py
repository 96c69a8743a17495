"""What is launched ahead of time is compiled by threads, writes nothing, and is there afterwards.

In processes of their own: this one may have Triton's interpreter on, which cannot be turned off.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# For tensors without memory, on a machine that may have no GPU.
OFFLINE = """
from triton.runtime.driver import driver
import torch
from bench.kernel_cases.compile_cases import CASES
from bench.compile_offline import _NoDriver, compile_into_cache
from kernels.ahead.triton_ahead import compiled_ahead

calls = [CASES["combine"], CASES["rescale"]]
driver.set_active(_NoDriver())
with compiled_ahead(torch.device("cpu"), num_threads=2) as compilers:
    for call in (*calls, *calls):
        call()
    assert not torch.empty(1000).any() and not torch.empty_like(torch.ones(1000)).any()
print(*sorted(compilers.names))
"""
AGAIN = """
for call in calls:
    compile_into_cache(call)
"""
# On a GPU: one kernel is launched at once, the others not.
LAUNCHED = """
import torch
from kernels.elementwise.quantise import quantise, quantise_reference
from kernels.elementwise.rms_norm import rms_norm
from kernels.ahead.triton_ahead import compiled_ahead

device = torch.device("cuda", torch.cuda.current_device())
x = torch.randn(33, 512, device=device, dtype=torch.bfloat16)
weight = torch.ones_like(x[0])
launched = ("kernels.elementwise.quantise_triton",)
with compiled_ahead(device, num_threads=4, launched=launched) as compilers:
    values, scales = quantise(x)
    assert not rms_norm(x, weight, 1e-6).any()
assert compilers.names == {"_rms_norm"}, compilers.names
assert values.view(torch.uint8).any() and scales.any()
"""
THEN = """
assert torch.equal(values.view(torch.uint8), quantise(x)[0].view(torch.uint8))
assert rms_norm(x, weight, 1e-6).any()
torch.cuda.synchronize()
"""


def run(script: str, cache: Path) -> tuple[str, set[str]]:
    """What it printed, and the files in Triton's cache afterwards."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, {str(path.relative_to(cache)) for path in cache.rglob("*.*")}


@pytest.mark.timeout(400)
def test_threads_compile_what_is_asked_for(tmp_path: Path) -> None:
    printed, compiled = run(OFFLINE, tmp_path)
    names = set(printed.split())
    assert "_combine" in names
    assert len(names) > 1
    found = {Path(name).stem for name in compiled if name.endswith(".cubin")}
    assert found == names
    _, again = run(OFFLINE + AGAIN, tmp_path)
    assert again == compiled


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_launches_find_all_of_it(tmp_path: Path) -> None:
    _, compiled = run(LAUNCHED, tmp_path)
    assert compiled
    _, again = run(LAUNCHED + THEN, tmp_path)
    assert again == compiled
