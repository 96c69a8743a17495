"""The path that is noted is the one that is launched: on a Hopper that is not here, by operands
without memory, with launchers that only say that they were called."""

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import kernels.attention
import kernels.gemm
from kernels.attention import (
    absorb,
    absorb_query,
    absorb_splits_cuda,
    mla_decode,
    mla_decode_cuda,
    mla_prefill,
    mla_prefill_cuda,
)
from kernels.attention.mla_decode_splits import Splits
from kernels.build import cuda_build, paths, tuned
from kernels.build.fp8_scales import empty_scales
from kernels.build.paths import noted
from kernels.gemm import fp8_gemm, fp8_gemm_choice, fp8_gemm_cuda, router_gemm, router_gemm_cuda
from kernels.moe import fp8_grouped_gemm

META = torch.device("meta")
HEADS, NOPE, ROPE, RANK, VALUE = 128, 128, 64, 512, 128
FP8, FLOAT = torch.float8_e4m3fn, torch.float32
# installed, whether ours can be compiled
MACHINES: list[tuple[set[str], bool]] = [
    ({"deep_gemm", "flash_mla", "triton"}, True),
    ({"deep_gemm", "flash_mla", "triton"}, False),
    ({"triton"}, True),
    ({"triton"}, False),
]


@dataclass
class Launches:
    """What was called since it was last asked."""

    monkeypatch: pytest.MonkeyPatch
    names: list[str] = field(default_factory=list)

    def spy(self, name: str, result: object = None) -> Callable[..., Any]:
        def launch(*_: object, **__: object) -> object:
            self.names.append(name)
            return result

        return launch

    def replace(self, target: object, name: str, path: str, result: object = None) -> None:
        self.monkeypatch.setattr(target, name, self.spy(path, result))

    def module(self, room: ModuleType, stem: str, **members: object) -> None:
        """One that would import Triton or a library."""
        stand_in = ModuleType(f"{room.__name__}.{stem}")
        vars(stand_in).update(members)
        self.monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
        self.monkeypatch.setattr(room, stem, stand_in, raising=False)

    def taken(self) -> list[str]:
        names, self.names = self.names, []
        return names


@pytest.fixture(params=MACHINES)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """On a machine: tensors of `meta` are on its H200."""
    installed: Collection[str] = request.param[0]
    best_path, fp8_table = paths._best_path, tuned.fp8_table
    best_path.cache_clear()
    fp8_table.cache_clear()
    monkeypatch.delenv("EPSERVE_KERNELS", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(paths, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(cuda_build, "is_built", lambda *_: request.param[1])
    monkeypatch.setattr(paths, "_best_path", lambda name, _, index: best_path(name, "cuda", index))
    monkeypatch.setattr(paths, "_noted", {})
    monkeypatch.setattr(fp8_gemm_choice, "fp8_table", lambda _: fp8_table(torch.device("cuda")))
    monkeypatch.setattr(mla_decode_cuda, "_is_hopper", lambda _: True)
    yield Launches(monkeypatch)
    best_path.cache_clear()
    fp8_table.cache_clear()


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.mark.parametrize("rows", [1, 48, 64, 96, 97, 128, 129, 4096])
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (24576, 1536), (7168, 16384), (640, 1024)])
def test_fp8_gemm(launches: Launches, rows: int, n: int, k: int) -> None:
    launches.replace(fp8_gemm_cuda, "dense", "cuda")
    launches.module(kernels.gemm, "fp8_gemm_deep_gemm", dense=launches.spy("deep_gemm"))
    launches.module(kernels.gemm, "fp8_gemm_triton", dense=launches.spy("triton"))
    x, weight = empty(rows, k, dtype=FP8), empty(n, k, dtype=FP8)
    given = x, empty_scales(x), weight
    fp8_gemm.fp8_gemm(*given, empty(-(-n // 128), k // 128, dtype=FLOAT))
    assert launches.taken() == [noted()["fp8_gemm"]]


@pytest.mark.parametrize("expected_rows", [1, 32, 128])
@pytest.mark.parametrize("capacity", [128, 100])
def test_masked_fp8_products(launches: Launches, expected_rows: int, capacity: int) -> None:
    launches.module(kernels.gemm, "fp8_gemm_deep_gemm", masked=launches.spy("deep_gemm"))
    launches.module(kernels.gemm, "fp8_gemm_triton", masked=launches.spy("triton"))
    x, weight = empty(4, capacity, 7168, dtype=FP8), empty(4, 4096, 7168, dtype=FP8)
    w_scale, counts = empty(4, 32, 56, dtype=FLOAT), empty(4, dtype=torch.int32)
    fp8_grouped_gemm.fp8_grouped_gemm_masked(
        x, empty_scales(x), weight, w_scale, counts, expected_rows=expected_rows
    )
    assert launches.taken() == [noted()["fp8_grouped_gemm"]]


@pytest.mark.parametrize("rows", [1, 128, 129])
@pytest.mark.parametrize("num_queries", [1, 4])
@pytest.mark.parametrize("page_tokens", [64, 16])
def test_mla_decode(launches: Launches, rows: int, num_queries: int, page_tokens: int) -> None:
    launches.replace(mla_decode_cuda, "launch", "cuda")
    launches.module(
        kernels.attention, "mla_decode_flash", suits=lambda _, cache, *__: cache.shape[1] == 64,
        Schedule=SimpleNamespace, launch=launches.spy("flash_mla"),
    )  # fmt: skip
    launches.module(
        kernels.attention, "mla_decode_triton", launch=launches.spy("triton", (None, None))
    )
    query, cache = empty(rows * num_queries, HEADS, RANK + ROPE), empty(9, page_tokens, RANK + ROPE)
    table, lengths = empty(rows, 2, dtype=torch.int32), empty(rows, dtype=torch.int32)
    schedule = sys.modules["kernels.attention.mla_decode_flash"].Schedule()
    mla_decode.mla_decode_splits(
        query, cache, table, lengths, value_dim=RANK, scale=1.0, schedule=schedule
    )
    assert launches.taken() == [noted()["mla_decode"]]


@pytest.mark.parametrize("value_dim", [VALUE, 64])
def test_mla_prefill(launches: Launches, value_dim: int) -> None:
    launches.replace(mla_prefill_cuda, "launch", "cuda")
    launches.module(kernels.attention, "mla_prefill_triton", launch=launches.spy("triton"))
    launches.monkeypatch.setattr(mla_prefill, "attend_groups", lambda attend, *_: attend())
    launches.monkeypatch.setattr(mla_prefill, "quantise", lambda _: None)
    query, cache = empty(5, HEADS, NOPE + ROPE), empty(9, 64, RANK + ROPE)
    kv_b = empty(HEADS, NOPE + value_dim, RANK)
    for attend in (mla_prefill.mla_prefill_grouped, mla_prefill.mla_prefill_quantised):
        attend(query, cache, kv_b, (), scale=1.0)
        assert launches.taken() == [noted()["mla_prefill"]]


@pytest.mark.parametrize("rows", [1, 2, 3, 255, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT])
def test_router_gemm(launches: Launches, rows: int, dtype: torch.dtype) -> None:
    launches.replace(router_gemm_cuda, "launch", "cuda")
    launches.replace(router_gemm, "router_gemm_reference", "reference")
    launches.replace(torch, "mm", "cublas")
    launches.module(kernels.gemm, "router_gemm_triton", launch=launches.spy("triton"))
    given = empty(rows, 7168, dtype=dtype), empty(256, 7168, dtype=dtype)
    router_gemm.router_gemm(*given)
    assert launches.taken() == [noted()["router_gemm"]]


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 128])
@pytest.mark.parametrize("value_dim", [VALUE, 64])
@pytest.mark.parametrize("in_splits", [False, True])
def test_absorbed_values(launches: Launches, rows: int, value_dim: int, *, in_splits: bool) -> None:
    launches.replace(absorb_splits_cuda, "launch", "cuda")
    launches.module(
        kernels.attention, "absorb_splits_triton", launch=launches.spy("triton"), MAX_ROWS=16
    )
    launches.module(kernels.attention, "absorb_triton", launch=launches.spy("triton"))
    latents: torch.Tensor | Splits = empty(rows, HEADS, RANK)
    launches.module(
        kernels.attention, "mla_decode_triton", join_splits=lambda splits: splits.values
    )
    launches.replace(absorb, "head_linear", "cublas", result=empty(rows, HEADS, value_dim))
    launches.monkeypatch.setattr(absorb, "quantise", lambda _: None)
    if in_splits:
        latents = Splits(
            values=empty(rows, HEADS, RANK), lse=empty(rows, HEADS, dtype=FLOAT),
            kv_lengths=empty(rows, dtype=torch.int32), num_parts=1, min_tiles=1, num_queries=1,
        )  # fmt: skip
    given = latents, empty(HEADS, NOPE + value_dim, RANK), NOPE
    absorb.absorb_values(*given)
    assert launches.taken() == [noted()["absorb"]]


@pytest.mark.parametrize("rows", [1, 128, 129])
def test_absorbed_queries(launches: Launches, rows: int) -> None:
    launches.module(kernels.attention, "absorb_query_triton", launch=launches.spy("triton"))
    launches.replace(absorb_query, "absorb_query_in_parts", "cublas")
    query, key_rope = empty(rows, HEADS, NOPE + ROPE), empty(rows, ROPE)
    cache, kv_b = empty(9, 64, RANK + ROPE), empty(HEADS, NOPE + VALUE, RANK)
    rotation = empty(rows, ROPE // 2, dtype=torch.complex64)
    absorb_query.absorb_query(
        query, empty(rows, RANK), key_rope, rotation, empty(rows, dtype=torch.int64), cache, kv_b,
        latent_norm=empty(RANK), eps=1e-6,
    )  # fmt: skip
    assert launches.taken() == [noted()["absorb"]]
