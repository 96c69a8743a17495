"""Products are noted in place of being computed, and shared among processes that leave a mark."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import astuple, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.gemm
from kernels.ahead import deep_gemm_ahead
from kernels.ahead.deep_gemm_ahead import (
    Product,
    compile_ahead,
    noted_products,
    of_all_lengths,
    shares,
)
from kernels.build.fp8_gemm_blocks import CONTIGUOUS, DENSE, MASKED
from kernels.build.fp8_scales import empty_scales

CPU = torch.device("cpu")
# Writes what it was told into the folder that it was given, in a file of its own.
SCRIBE = """
import os, sys
from pathlib import Path
Path(sys.argv[1], str(os.getpid())).write_bytes(sys.stdin.buffer.read())
"""


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A library that cannot compute."""
    monkeypatch.setitem(sys.modules, "deep_gemm", ModuleType("deep_gemm"))
    monkeypatch.delitem(sys.modules, "kernels.gemm.fp8_gemm_deep_gemm", raising=False)
    monkeypatch.delattr(kernels.gemm, "fp8_gemm_deep_gemm", raising=False)
    yield
    sys.modules.pop("kernels.gemm.fp8_gemm_deep_gemm", None)
    vars(kernels.gemm).pop("fp8_gemm_deep_gemm", None)


def operands(*rows: int, n: int, k: int, experts: int = 0) -> tuple[torch.Tensor, ...]:
    lead = (experts,) if experts else ()
    x = torch.zeros(*rows, k, dtype=torch.float8_e4m3fn)
    weight = torch.zeros(*lead, n, k, dtype=torch.float8_e4m3fn)
    return x, empty_scales(x), weight, torch.ones(*lead, -(-n // 128), k // 128)


@pytest.mark.usefixtures("deep_gemm")
def test_what_is_asked_for_is_noted_and_zero() -> None:
    from kernels.gemm import fp8_gemm_deep_gemm

    with noted_products() as products:
        dense = fp8_gemm_deep_gemm.dense(operands(5, n=192, k=256))
        counts = torch.zeros(3, dtype=torch.int32)
        masked = fp8_gemm_deep_gemm.masked(operands(3, 128, n=256, k=128, experts=3), counts, 7)
        ends = torch.zeros(4, dtype=torch.int32)
        rows = operands(256, n=128, k=128, experts=4)
        contiguous = fp8_gemm_deep_gemm.contiguous(rows, ends)
        fp8_gemm_deep_gemm.dense(operands(5, n=192, k=256))
    assert products == {
        Product(DENSE, 0, 192, 256, 5, 0),
        Product(MASKED, 3, 256, 128, 128, 7),
        Product(CONTIGUOUS, 4, 128, 128, 256, 0),
    }
    assert dense.shape == (5, 192)
    assert masked.shape == (3, 128, 256)
    assert contiguous.shape == (256, 128)
    assert not any(out.any() for out in (dense, masked, contiguous))
    with pytest.raises(AttributeError):
        fp8_gemm_deep_gemm.dense(operands(5, n=192, k=256))


def made_up(rng: random.Random, count: int) -> set[Product]:
    return {
        Product(DENSE, 0, rng.choice((128, 256, 512)), rng.choice((128, 256)), rows, 0)
        for rows in rng.sample(range(1, 4096), count)
    }


def test_shares_are_all_products_once_and_those_of_similar_rows_are_spread() -> None:
    products = made_up(random.Random(11), 40)
    for num_shares in (1, 3, 16, 64):
        parts = shares(products, num_shares)
        assert parts == shares(sorted(products, reverse=True), num_shares), "as ranks"
        assert len(parts) == min(num_shares, 40)
        assert sorted(product for part in parts for product in part) == sorted(products)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    lengths = {Product(DENSE, 0, 128, 128, rows, 0) for rows in range(64, 8192, 64)}
    for part in shares(lengths, 8):
        rows = [product.rows for product in part]
        assert min(rows) < 2048 < 6144 < max(rows)


def test_dense_products_are_of_all_lengths_for_which_the_library_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def faster_path(device: torch.device, layout: int, rows: int, n: int, k: int) -> str:
        assert (device, layout, k) == (CPU, DENSE, 256)
        return "triton" if n == 512 and rows <= 128 else "deep_gemm"

    monkeypatch.setattr(deep_gemm_ahead, "faster_path", faster_path)
    noted = {
        Product(DENSE, 0, 384, 256, 5, 0),
        Product(DENSE, 0, 384, 256, 200, 0),
        Product(DENSE, 0, 512, 256, 320, 0),
        Product(MASKED, 3, 256, 128, 1024, 7),
        Product(CONTIGUOUS, 4, 128, 128, 1024, 0),
    }
    found = of_all_lengths(noted, CPU)
    assert found - noted == {
        *(Product(DENSE, 0, 384, 256, rows, 0) for rows in (64, 128, 192)),
        *(Product(DENSE, 0, 512, 256, rows, 0) for rows in (192, 256)),
    }
    assert noted <= found


def test_processes_get_all_products_and_a_second_start_begins_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    products = made_up(random.Random(5), 9)
    for folder, is_asked in (("first", True), ("second", False)):
        told = tmp_path / folder
        told.mkdir()
        command = (sys.executable, "-c", SCRIBE, str(told))
        compile_ahead(products, CPU, num_processes=2, command=command)
        found = [json.loads(path.read_bytes()) for path in told.iterdir()]
        assert len(found) == (2 if is_asked else 0)
        if is_asked:
            assert {Product(*each) for part in found for each in part} == products


def test_another_library_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known by its version, whenever it was installed."""
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    products = made_up(random.Random(7), 3)
    for installed, num_asked in (("2.1", 1), ("2.1", 0), ("2.2", 1)):
        site = tmp_path / installed / f"sgl_deep_gemm-{installed}.dist-info"
        site.mkdir(parents=True, exist_ok=True)
        (site / "METADATA").write_text(f"Name: sgl-deep-gemm\nVersion: {installed}\n")
        monkeypatch.syspath_prepend(site.parent)
        told = tmp_path / "told"
        told.mkdir()
        command = (sys.executable, "-c", SCRIBE, str(told))
        compile_ahead(products, CPU, num_processes=1, command=command)
        assert len(list(told.iterdir())) == num_asked
        shutil.rmtree(told)


def test_a_process_that_fails_leaves_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    products = made_up(random.Random(6), 4)
    failing = (sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)")
    compile_ahead(products, CPU, num_processes=2, command=failing)
    assert not (tmp_path / "cache").exists()
    compile_ahead(set(), CPU, num_processes=2, command=failing)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("deep_gemm") is None, reason="needs DeepGEMM")
def test_kernels_are_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that products of other processes' shares need: this one's finds them all."""
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    products = {
        Product(DENSE, 0, 2112, 7168, 64, 0),
        Product(MASKED, 4, 4096, 7168, 128, 16),
        Product(CONTIGUOUS, 4, 7168, 2048, 512, 0),
    }
    device = torch.device("cuda", torch.cuda.current_device())
    compile_ahead(products, device, num_processes=3)
    assert len(list(tmp_path.glob("ahead-*"))) == 1
    compiled = set(tmp_path.rglob("*.cubin"))
    assert len(compiled) >= 3
    compute_by_another(products, device)
    assert set(tmp_path.rglob("*.cubin")) == compiled


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("deep_gemm") is None, reason="needs DeepGEMM")
def test_no_length_needs_another_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    device = torch.device("cuda", torch.cuda.current_device())
    longest = Product(DENSE, 0, 2112, 7168, 1024, 0)
    compile_ahead(of_all_lengths({longest}, device), device, num_processes=8)
    compiled = set(tmp_path.rglob("*.cubin"))
    assert len(compiled) > 3
    rows = random.Random().sample(range(129, 1024), 300)
    compute_by_another({replace(longest, rows=each) for each in rows}, device)
    assert set(tmp_path.rglob("*.cubin")) == compiled


def compute_by_another(products: Collection[Product], device: torch.device) -> None:
    command = (sys.executable, "-m", "kernels.ahead.deep_gemm_ahead", str(device), str(os.getpid()))
    told = json.dumps([astuple(product) for product in products]).encode()
    subprocess.run(command, input=told, check=True)
