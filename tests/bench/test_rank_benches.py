"""Benches of one emulated rank, at sizes of a moment: they measure what they say."""

import json
from pathlib import Path

import pytest
import torch

from bench import decode_rank, prefill_rank
from bench.pictures.step import draw, read_step
from bench.ranks.deepseek_v3_config import SMALL, write_config
from bench.ranks.emulated_rank import EmulatedRank, InTurn, pages_for
from bench.ranks.step_breakdown import (
    OTHER,
    PURPOSES,
    Kernel,
    by_purpose,
    purpose_of,
    write_breakdown,
)
from bench.records import RESULTS, read
from model.config import ModelConfig

FLAGS = ["--small", "--layers", "2", "--record"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_decode_step_is_measured(tmp_path: Path) -> None:
    flags = [*FLAGS, "--results", str(tmp_path), "--batches", "1", "3", "--context", "100"]
    assert decode_rank.main([*flags, "--steps", "1", "--weights", "fp8"]) == 0
    records = [r for r in read(tmp_path / "decode_rank.jsonl") if r.metric == "step"]
    assert [r.case for r in records] == [
        f"fp8, 2 layers, context 100, batch {batch}" for batch in (1, 3)
    ]
    assert all(r.value > 0 and r.peer is None for r in records)


@pytest.mark.slow  # profilers take their time to start
def test_a_decode_step_is_broken_down(tmp_path: Path) -> None:
    flags = [*FLAGS, "--results", str(tmp_path), "--batches", "1", "3", "--context", "100"]
    assert decode_rank.main([*flags, "--steps", "1", "--profile", "3"]) == 0
    records = list(read(tmp_path / "decode_rank.jsonl"))
    names = {"fp8": "fp8", "w4afp8": "w4afp8", "w4afp8-static": "w4afp8 static scales"}
    for weights, name in names.items():
        where = f"{name}, 2 layers, context 100"
        metrics = {(r.case, r.metric): r.value for r in records if r.case.startswith(where)}
        for batch in (1, 3):
            assert metrics[f"{where}, batch {batch}", "step"] > 0
            assert metrics[f"{where}, batch {batch}", "step with its launch"] > 0
        details = json.loads((tmp_path / "details" / f"decode_rank_{weights}_3.json").read_text())
        assert details["num_kernels"] == sum(kernel["count"] for kernel in details["kernels"])
        assert {each["purpose"] for each in details["purposes"]} <= {OTHER, *PURPOSES.values()}


def test_a_prefill_pass_is_measured(tmp_path: Path) -> None:
    flags = [*FLAGS, "--results", str(tmp_path), "--tokens", "40", "--passes", "1"]
    assert prefill_rank.main([*flags, "--weights", "fp8"]) == 0
    metrics = {record.metric: record.value for record in read(tmp_path / "prefill_rank.jsonl")}
    assert 0 < metrics["time until all is launched"] <= metrics["pass"]


def test_experts_get_equally_many_rows(tmp_path: Path) -> None:
    rank = EmulatedRank.load(
        tmp_path, weights="fp8", device=torch.device("cpu"), max_tokens=8,
        num_pages=pages_for([8], 100), num_layers=2, sizes=SMALL,
    )  # fmt: skip
    assert rank.num_slots == 8, "an eighth of 64"
    slots = InTurn(8).like(torch.zeros(6, 4, dtype=torch.int64))
    assert torch.bincount(slots.flatten(), minlength=8).tolist() == [3] * 8
    assert all(len(set(row)) == 4 for row in slots.tolist())
    pieces = rank.decode_pieces(8, 100)
    pages = [page for piece in pieces for page in piece.pages]
    assert len(set(pages)) == len(pages) == 8 * 2
    one, two, eight = (decode_rank.memory_bytes(rank, batch, 100) for batch in (1, 2, 8))
    # One token of four choices reads half of the experts, more tokens all of them; each has 101
    # latents in each layer. One of the two layers has experts: 3 matrices of 256 x 128 each.
    latents = 2 * 101 * rank.model.config.kv_dim * 4
    assert eight - two == 6 * latents
    assert two - one - latents >= 4 * 3 * 256 * 128


def test_kernels_have_purposes() -> None:
    named = {
        "void sm90_fp8_gemm_1d2d_impl<128u, (cute::GemmType)0>": "dense products",
        "grouped_gemm(Arguments)": "expert products",
        "_silu_mul_quantise": "quantise and activate",
        "_attend": "attention",
        "flash_fwd_splitkv_mla_kernel": "attention",
        "_router_gemm": "gate",
        "_combine": "permute and combine",
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "dense products",
        "_absorb_query": "dense products",
        "_fp8_grouped_gemm": "expert products",
        "_fp8_gemm": "dense products",
        "_add_splits": "dense products",
        "Memcpy HtoD": OTHER,
    }
    assert {name: purpose_of(name) for name in named} == named
    kernels = [
        Kernel(name=name, purpose=purpose, count=1, microseconds=float(number))
        for number, (name, purpose) in enumerate(named.items())
    ]
    sums = by_purpose(kernels)
    assert sums["attention"] == 3 + 4
    assert list(sums.values()) == sorted(sums.values(), reverse=True)


def test_a_breakdown_is_written_and_drawn(tmp_path: Path) -> None:
    kernels = [
        Kernel(
            name="void (anonymous namespace)::attend<2>(Maps)", purpose="attention", count=61,
            microseconds=9150.0,
        ),
        Kernel(name="_rms_norm", purpose="norms and rotation", count=122, microseconds=800.0),
    ]  # fmt: skip
    write_breakdown(tmp_path / "step.json", "fp8, batch 128", kernels)
    step = read_step(tmp_path / "step.json")
    assert step.microseconds == 9950.0
    times = ((9150.0, None), (800.0, None))
    assert step.purposes == [("attention", *times[0]), ("norms and rotation", *times[1])]
    assert step.kernels == [("attend", *times[0]), ("_rms_norm", *times[1])]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="no breakdown"):
        read_step(tmp_path / "other.json")


def test_breakdowns_in_git_can_be_drawn(tmp_path: Path) -> None:
    steps = [read_step(path) for path in sorted((RESULTS / "details").glob("*_rank_*.json"))]
    assert len(steps) == 8
    assert {each.purposes[0].floor is None for each in steps} == {True, False}, "prefill has none"
    names = [bar.name for bar in steps[0].kernels]
    assert "attention" in names, "what is known to compute one thing is called so"
    draw(steps[:2], tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_purposes_are_those_of_breakdowns_in_git() -> None:
    for path in (RESULTS / "details").glob("*_rank_*.json"):
        for kernel in json.loads(path.read_text())["kernels"]:
            assert purpose_of(kernel["name"]) == kernel["purpose"], kernel["name"]


def test_a_config_of_any_depth_is_one_that_can_be_served(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write_config(tmp_path, weights="w4afp8", num_layers=10))
    assert (config.num_layers, config.num_moe_layers, config.num_experts) == (10, 7, 256)
    assert (config.kv_dim, config.qk_head_dim, config.max_position) == (576, 192, 163840)
