"""Benches of several ranks, at sizes of a moment, and what they have in common."""

import random
from pathlib import Path

import pytest
import torch

from bench import cluster, decode_full, kv_push, kv_transfer, prefill_full
from bench.kv_transfer import Size, copies_of, pages_of_prompt
from bench.ranks.full_ranks import Asked, Times, slowest
from bench.ranks.used_pool import used_pool
from bench.records import read
from engine.kv.pages import pages_of
from loadgen.records import BenchRun
from model.batch import AttentionForm

FLAGS = ["--small", "--layers", "2", "--steps", "1", "--record", "--context", "70"]


@pytest.mark.slow
def test_decode_steps_over_ranks(tmp_path: Path) -> None:
    flags = [*FLAGS, "--experts", "32", "--lengths", "2", "--results", str(tmp_path)]
    assert decode_full.main(flags) == 0
    metrics = {record.metric: record for record in read(tmp_path / "decode_full.jsonl")}
    case = "w4afp8, 2 layers of 32 experts, 2 ranks, collective, context 70, batch 2"
    assert {record.case for record in metrics.values()} == {case}
    assert metrics["step"].value > 0
    tokens = metrics["output tokens a second and GPU"]
    assert tokens.value == pytest.approx(2000 / metrics["step"].value, rel=1e-2)
    assert tokens.peer is None


@pytest.mark.slow
def test_prefill_passes_over_ranks(tmp_path: Path) -> None:
    assert prefill_full.main([*FLAGS, "--lengths", "70", "--results", str(tmp_path)]) == 0
    metrics = {record.metric: record.value for record in read(tmp_path / "prefill_full.jsonl")}
    assert metrics["input tokens a second and GPU"] == pytest.approx(
        70_000 / metrics["pass"], rel=1e-2
    )


@pytest.mark.slow
def test_pages_arrive(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--layers", "2", "--pages", "96", "--tokens", "1000", "--requests", "50"]
    assert kv_transfer.main([*flags, "--repeats", "2"]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if " rate " in line]
    assert len(lines) == 4
    assert all(line.startswith("1000 tokens, 2 layers, ") for line in lines)


@pytest.mark.slow
def test_a_prompt_is_pushed_while_it_is_computed(tmp_path: Path) -> None:
    flags = ["--layers", "2", "--pages", "96", "--tokens", "200", "--chunk-tokens", "128"]
    flags += ["--requests", "50", "--repeats", "2", "--record", "--results", str(tmp_path)]
    assert kv_push.main(flags) == 0
    records = list(read(tmp_path / "kv_push.jsonl"))
    assert {r.case for r in records} == {
        f"fp8, 2 layers, 200 tokens, {age} pools" for age in ("new", "used")
    }
    assert all(r.value > 0 for r in records if r.unit == "ms")


def test_a_push_is_held_against_the_prefill_alone() -> None:
    size = Size(
        num_layers=10, num_pages=8192, page_bytes=0, prompt_tokens=4096, repeats=9, requests=0
    )
    prefill = kv_push.Prefill(weights="fp8", chunk_tokens=2048, small=False, size=size)
    times = kv_push.Times(age="new", alone=0.1, first_token=0.102, landed=0.103)
    run = BenchRun(date="", commit="", gpu="", bench="kv_push")
    first, landed, later = kv_push.records(run, prefill, [times])
    assert (first.value, first.peer_value) == (102.0, 100.0)
    assert (landed.value, landed.peer_value) == (103.0, 100.0)
    assert (later.value, later.unit) == (2.0, "%")


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("weights", ["fp8", "w4afp8"])
def test_a_cluster_serves_a_model_that_is_made_up(tmp_path: Path, weights: str) -> None:
    """The folder has a configuration and a tokenizer; the rest is everyone's own."""
    flags = ["--small", "--layers", "3", "--requests", "4", "--concurrency", "2", "--record"]
    flags += ["--prompt-tokens", "70", "--output-tokens", "6", "--weights", weights]
    assert cluster.main([*flags, "--results", str(tmp_path)]) == 0
    metrics = {record.metric: record.value for record in read(tmp_path / "cluster.jsonl")}
    assert (metrics["num_requests"], metrics["num_errors"]) == (4, 0)
    assert 0 < metrics["ttft_p50"] < metrics["e2e_p50"]
    for worker in ("prefill-0", "decode-0"):
        start = {
            name.rpartition(", ")[2]: value
            for name, value in metrics.items()
            if name.startswith(f"{worker} start, ")
        }
        others = start.pop("all but load")
        assert {"python", "group", "load", "warm_up", "graphs", "transfer"} <= set(start)
        assert others == pytest.approx(sum(start.values()) - start["load"], rel=1e-2)
    assert metrics["decode-0 waits between steps"] > 0
    assert "prefill-0 waits between steps" not in metrics


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_used_pool_is_in_pieces_and_whole(role: str) -> None:
    pool = used_pool(512, role="decode" if role == "decode" else "prefill", seed=3, room=40,
                     num_requests=400)  # fmt: skip
    pool.check_integrity()
    assert 40 <= pool.num_free < 512 // 2
    again = used_pool(512, role="decode" if role == "decode" else "prefill", seed=3, room=40,
                      num_requests=400)  # fmt: skip
    assert pool.allocate("x", 40) == again.allocate("x", 40), "the same use, the same pieces"
    whole = used_pool(512, role="decode", seed=4, room=40, num_requests=400)
    assert len(whole.allocate("all", whole.num_free)) > 1


def test_every_page_of_every_layer_is_copied_once() -> None:
    size = Size(
        num_layers=3, num_pages=64, page_bytes=10, prompt_tokens=500, repeats=1, requests=30
    )
    ours, theirs = (pages_of_prompt("used", rank, size) for rank in (1, 0))
    copies = list(copies_of(ours, theirs, range(3), size))
    assert len(copies) == 3 * 8
    assert sum(copy.num_bytes for copy in copies) == size.prompt_bytes
    for layer in range(3):
        pairs = [(c.source_offset // 10 - 64 * layer, c.target_offset // 10 - 64 * layer)
                 for c in copies[8 * layer : 8 * layer + 8]]  # fmt: skip
        assert pairs == list(zip(pages_of(ours), pages_of(theirs), strict=True))


def test_a_group_is_as_fast_as_its_slowest_rank() -> None:
    rng = random.Random(0)
    ranks = [
        [Times(length=n, device=rng.random(), whole=1 + rng.random()) for n in (1, 8)]
        for _ in range(3)
    ]
    for index, times in enumerate(slowest(ranks)):
        assert times.length == (1, 8)[index]
        assert times.device == max(rank[index].device for rank in ranks)
        assert times.whole == max(rank[index].whole for rank in ranks)


def test_what_ranks_are_told_is_enough_for_what_they_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked = Asked(
        folder=tmp_path, weights="fp8", form=AttentionForm.ABSORBED, lengths=(1, 128),
        context=2048, steps=1, dispatcher="deep_ep",
    )  # fmt: skip
    settings = asked.settings(4, torch.device("cuda"))
    assert settings.kv_pages >= 128 * (2049 // 64 + 1)
    assert settings.max_model_len > 2048
    assert (settings.ranks, settings.ep_dispatcher, settings.max_running) == (4, "deep_ep", 128)
    assert settings.cuda_graph_batch_sizes == (1, 128)
