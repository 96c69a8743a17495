"""The benchmark of kernels, as far as it goes without a GPU: its cases, floors and records."""

import re
from dataclasses import replace

import pytest

from bench import kernel_variants
from bench.kernel_case import Case, Tensors
from bench.kernels import Measured, cases
from bench.kernels_floor import FP8_FLOPS
from bench.records import Run

RUN = Run(date="2026-01-01T00:00:00+00:00", commit="abc", gpu="1 x NVIDIA H200", bench="fp8_gemm")


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
        "quantise", "silu_mul", "merge_states", "router_gemm", "fp8_gemm", "mla_decode",
        "mla_prefill",
    } == {each.bench for each in found}  # fmt: skip
    for each in found:
        assert len(each.ways) >= 2, each.name
    assert next(iter(found[0].ways)) == "in use"
