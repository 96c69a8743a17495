"""The benchmark of kernels, as far as it goes without a GPU: its cases, floors and records."""

import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from bench import (
    kernel_cases_attention,
    kernel_cases_experts,
    kernel_cases_products,
    kernel_cases_rows,
    kernel_variants,
    kernels_w4a8,
)
from bench.kernel_case import Case, Tensors, in_turn
from bench.kernels import Measured, cases
from bench.kernels_floor import FP8_FLOPS
from bench.records import Run
from kernels.build.paths import OPERATIONS
from tests.kernels.triton_device import INTERPRETED

RUN = Run(date="2026-01-01T00:00:00+00:00", commit="abc", gpu="1 x NVIDIA H200", bench="fp8_gemm")
# Sizes at which references take no time; those of a module's own come on top.
SMALL = {
    "HIDDEN": 256, "WIDTH": 128, "EXPERTS": 16, "LOCAL": 2, "CHOICES": 4, "HEADS": 2,
    "VOCABULARY": 512,
}  # fmt: skip
SMALL_OF_MODULES: list[tuple[ModuleType, dict[str, Any]]] = [
    (kernel_cases_rows, {"TOKENS": (2,)}),
    (kernel_cases_experts, {"SENT": (2,), "MASKED": (3,), "CAPACITY": 4}),
    (
        kernel_cases_products,
        {
            "DENSE": ((256, 128),), "DENSE_TOKENS": (2,), "GROUPED": ((256, 256), (256, 128)),
            "MASKED": (2,), "CONTIGUOUS": (2, 128), "ROUTED": (1,),
        },
    ),
    (
        kernel_cases_attention,
        {
            "FOLDED": (2,), "JOINED": (1, 3), "CACHED": 100, "BY_TRITON": 1,
            "DECODED": ((2, 1, 64), (1, 3, 128)), "PREFILLED": ((128, 128),),
        },
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def all_cases() -> list[Case]:
    return list(cases(Tensors("meta")))


def test_every_case_has_a_name_of_its_own_and_a_floor(all_cases: list[Case]) -> None:
    names = [(each.bench, each.name) for each in all_cases]
    assert len(set(names)) == len(names) > 60
    for case in all_cases:
        assert re.fullmatch(r"[a-z0-9_]+", case.bench)
        assert 0 < case.floor(4.2e12) < 1e5, case.name
    assert ("fp8_grouped_gemm", "masked e32 m64 n4096 k7168") in names


def test_floors_are_the_larger_of_bytes_and_flops(all_cases: list[Case]) -> None:
    by_name = {(each.bench, each.name): each for each in all_cases}
    few = by_name["fp8_gemm", "dense m64 n7168 k16384"]
    many = by_name["fp8_gemm", "dense m4096 n7168 k16384"]
    assert few.floor(4e12) == pytest.approx((7168 * 16384 + 64 * (16384 + 2 * 7168)) / 4e6)
    assert many.floor(4e12) == pytest.approx(1e6 * 2 * 4096 * 7168 * 16384 / FP8_FLOPS)


def test_every_operation_is_measured(all_cases: list[Case]) -> None:
    measured = {each.bench for each in all_cases} | {kernels_w4a8.BENCH}
    assert set(OPERATIONS) <= measured
    names = {f"{each.bench} {each.name}" for each in all_cases}
    assert {
        "absorb values m128 heads128",
        "absorb values of pieces b128 heads128 kv4096",
        "absorb_query m128 heads128",
        "grouped_linear masked e32 m64 n4096 k7168",
        "grouped_linear aligned e8 m4096 n4096 k7168",
        "mla_decode triton b128 heads128 kv4096",
        "mla_decode b32 q4 heads128 kv4096",
        "mla_decode b16 q8 heads128 kv4096",
        "pack_tokens quantise m128 h7168 top8",
        "quantise masked e32 m32 k7168",
        "rescale e32 m32 k7168",
        "rms_norm combine add both m128 h7168",
        "silu_mul masked e32 m32 i2048",
        "silu_mul masked quantise e32 m32 i2048",
    } <= names
    with_peers = {each.bench for each in all_cases if each.library is not None}
    assert with_peers == {
        "fp8_gemm", "fp8_grouped_gemm", "grouped_linear", "mla_decode", "sample",
    }  # fmt: skip


def test_floors_by_hand(all_cases: list[Case]) -> None:
    """Bytes for what is given and what comes out, or FLOPs."""
    by_name = {f"{each.bench} {each.name}": each for each in all_cases}
    value = 2 * 128 * 128 * 512  # bytes of the value half of kv_b, as of the other
    masked = 32 * 32  # rows
    for name, num_bytes in {
        "absorb values m16 heads128": value + 16 * 128 * (2 * 512 + 128 + 4),
        # A row of 64 tiles in 32 pieces of 2: 66 parts would have less than 2 each.
        "absorb values of pieces b1 heads128 kv4096": (
            value + 32 * 128 * (2 * 512 + 4) + 128 * (128 + 4)
        ),
        # 16 rows of 64 tiles in stretches of 16: each row has four.
        "absorb values of pieces b16 heads128 kv4096": (
            value + 64 * 128 * (2 * 512 + 4) + 16 * 128 * (128 + 4)
        ),
        "absorb_query m1 heads128": value + 2 * (128 * 192 + 128 * 576 + 2 * 576),
        "grouped_linear masked e32 m16 n7168 k2048": (2 * 32 * (7168 * 2048 + 16 * (7168 + 2048))),
        "quantise masked e32 m32 k7168": masked * (7168 * 3 + 56 * 4),
        "silu_mul masked quantise e32 m32 i2048": masked * (2048 * 5 + 16 * 4),
        "rescale e32 m32 k7168": masked * (7168 * 2 + 56 * 4),
        "pack_tokens quantise m128 h7168 top8": 128 * (7168 * 3 + 56 * 4 + 8 * 20),
        "pack_tokens m128 h7168 top8": 128 * (7168 * 4 + 8 * 20),
        "rms_norm combine add both m128 h7168": 128 * 7168 * (5 * 2 + 1),
        "mla_decode triton b128 heads128 kv4096": 2 * 128 * (4096 * 576 + 128 * (576 + 512)),
    }.items():
        assert by_name[name].floor(4e12) == pytest.approx(num_bytes / 4e6), name
    for name, num_flops in {
        "grouped_linear aligned e8 m4096 n4096 k7168": 2 * 8 * 4096 * 4096 * 7168,
        # The first of four sees three tokens less than the last.
        "mla_decode b32 q4 heads128 kv4096": (
            2 * 32 * 128 * (4093 + 4094 + 4095 + 4096) * (576 + 512)
        ),
        "mla_decode triton b16 q8 heads128 kv4096": (
            2 * 16 * 128 * sum(range(4089, 4097)) * (576 + 512)
        ),
    }.items():
        assert by_name[name].floor(4e12) == pytest.approx(num_flops / 989.5e6), name


@pytest.mark.skipif(not INTERPRETED, reason="a GPU runs the cases themselves")
@pytest.mark.parametrize(("module", "sizes"), SMALL_OF_MODULES)
def test_calls_fit_at_small_sizes(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, sizes: dict[str, Any]
) -> None:
    """By the references and Triton's interpreter, whose BF16 results mean nothing: only arguments
    are tried. Our kernels of attention need a GPU."""
    usual = {name: value for name, value in SMALL.items() if hasattr(module, name)}
    for name, value in {**usual, **sizes}.items():
        assert hasattr(module, name), name
        monkeypatch.setattr(module, name, value)
    for case in module.cases(Tensors("cpu")):
        assert case.floor(4e12) > 0
        is_cuda = case.bench == "mla_decode" and not case.name.startswith("triton")
        if not is_cuda and case.bench != "mla_prefill":
            case.call()


def test_calls_take_turns() -> None:
    called: list[str] = []
    call = in_turn([lambda: called.append("a"), lambda: called.append("b")])
    for _ in range(3):
        call()
    assert called == ["a", "b", "a"]


def test_int4_products_have_names_of_their_own_and_floors() -> None:
    by_name = {each.name: each for each in kernels_w4a8.cases()}
    assert len(by_name) == len(list(kernels_w4a8.cases()))
    masked = by_name["masked e32 m64 n4096 k7168 static scale"]
    assert masked.floor(4e12) == by_name["masked e32 m64 n4096 k7168"].floor(4e12)
    weights = 32 * 4096 * 7168 * (0.5 + 2 / 128)
    assert masked.floor(4e12) == pytest.approx((weights + 32 * 64 * (7168 + 2 * 4096)) / 4e6)
    for name in ("gated e32 m64 n4096 k7168", "gated e32 m64 n4096 k7168 static scale"):
        # FP8, of half as many columns.
        assert by_name[name].floor(4e12) == pytest.approx((weights + 32 * 64 * (7168 + 2048)) / 4e6)
    assert {
        "contiguous e8 m4096 n4096 k7168 static scale",
        "contiguous e8 m4096 n7168 k2048 row scales",
        "masked e32 m256 n7168 k2048 static scale",
        "masked e32 m128 n7168 k2048 with -8",
        "gated e32 m256 n4096 k7168",
    } <= set(by_name)


def test_an_int4_case_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels_w4a8.main(["--only", "masked e32 m64 n4096 k7168", "masked e33"])
    assert "no such case: masked e33" in capsys.readouterr().err


def test_int4_products_of_small_sizes() -> None:
    """Every layout with every kind of scales, through the reference."""
    make, sizes = Tensors("cpu"), {"num_experts": 2, "rows": 3, "n": 256, "k": 256}
    weights = kernels_w4a8.Weights(3, 256, 256, make)
    for with_smallest in (False, True):
        for scales in ("group", "row", "all"):
            for capacity, is_gated in ((0, False), (4, False), (4, True)):
                case = kernels_w4a8.Case(
                    **sizes, capacity=capacity, with_smallest=with_smallest, scales=scales,
                    is_gated=is_gated,
                )  # fmt: skip
                found = kernels_w4a8.ours(case, weights.packed(case), make)()
                values = found[0] if is_gated else found
                rows = values[:, :3] if capacity else values
                assert rows.shape == ((2, 3) if capacity else (6,)) + (128 if is_gated else 256,)
                assert rows.float().isfinite().all()
                # Neither zeros nor, where they are FP8, all the largest.
                assert len(rows.float().abs().unique()) > 20, case.name
    fp8, scales = weights.fp8(case)
    assert (fp8.shape, scales.shape) == ((2, 256, 256), (2, 2, 2))
    assert weights.packed(case).num_experts == 2


def test_records_name_each_peer(all_cases: list[Case]) -> None:
    case = next(each for each in all_cases if each.bench == "fp8_gemm")
    measured = Measured(case=case, ours=50.0, library=40.0, floor=30.0)
    peers = [(each.peer, each.peer_value, each.value) for each in measured.records(RUN)]
    assert peers == [("DeepGEMM", 40.0, 50.0), ("floor", 30.0, 50.0)]
    assert "0.60" in measured.line()
    assert "0.80" in measured.line()
    alone = replace(measured, library=None)
    assert [each.peer for each in alone.records(RUN)] == ["floor"]
    assert "DeepGEMM" not in alone.line()


def test_variants_have_what_is_in_use_first() -> None:
    found = list(kernel_variants.all_of(Tensors("meta")))
    assert {
        "quantise", "silu_mul", "router_gemm", "fp8_gemm", "mla_decode",
        "mla_prefill",
    } == {each.bench for each in found}  # fmt: skip
    for each in found:
        assert len(each.ways) >= 2, each.name
    assert next(iter(found[0].ways)) == "in use"
