"""Memory worked out before it is allocated: what fits, what does not, and who is to blame."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.ranks.deepseek_v3_config import write_config
from core.memory_term import MemoryTerm
from engine.process.settings import WorkerSettings
from engine.start.memory_plan import (
    ACTIVATIONS,
    GRAPHS,
    KV,
    LIBRARIES,
    LIBRARY_BYTES,
    MemoryPlan,
    activation_bytes,
    graph_bytes,
    plan_memory,
)
from engine.start.start_plan import dispatch_needs, recorded_passes, recorded_sizes
from ep.dispatch.dispatchers import dispatch_terms
from model.batch import AttentionForm
from model.config import ModelConfig
from model.known_models import WeightFormat
from model.weight_bytes import planned_weights
from model.weights.dummy_checkpoint import DummyCheckpoint
from model.weights.weights import Weights

GIB = 1 << 30
H200_BYTES = 140 * GIB  # as the driver tells it
BF16 = torch.bfloat16
DECODE, PREFILL = AttentionForm.ABSORBED, AttentionForm.PLAIN


@dataclass(frozen=True)
class FullSize:
    """DeepSeek-V3's headers, which take a second to make up."""

    folder: Path
    config: ModelConfig
    source: DummyCheckpoint


FullSizes = Callable[[WeightFormat], FullSize]


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> FullSizes:
    @cache
    def made(weights: WeightFormat) -> FullSize:
        folder = write_config(tmp_path_factory.mktemp(weights), weights=weights)
        source = DummyCheckpoint(folder, "cuda")
        return FullSize(folder, ModelConfig.from_folder(folder), source)

    return made


def deepseek_v3(
    model: FullSize,
    ranks: int,
    form: AttentionForm,
    memory_bytes: int = H200_BYTES,
    others_bytes: int = 0,
    nodes: int = 1,
    **told: Any,
) -> MemoryPlan:
    config = model.config
    settings = WorkerSettings(
        model=model.folder, device="cuda", ranks=ranks, nodes=nodes, load_format="dummy",
        rendezvous="first:1" if nodes > 1 else "", **told,
    )  # fmt: skip
    num_slots = -(-256 // settings.group_size)
    needs = dispatch_needs(settings, config, num_slots, form, BF16.itemsize)
    return plan_memory(
        settings,
        config,
        weights=planned_weights(
            Weights(checkpoint=model.source, device=torch.device("cuda"), dtype=BF16),
            config,
            num_slots=num_slots,
        ),
        dispatch=dispatch_terms("deep_ep", needs, settings.group_size),
        graph_sizes=recorded_sizes(settings, form),
        num_slots=num_slots,
        itemsize=BF16.itemsize,
        memory_bytes=memory_bytes,
        others_bytes=others_bytes,
    )


def by_name(plan: MemoryPlan) -> dict[str, int]:
    return {term.name: term.num_bytes for term in plan.terms}


@pytest.mark.parametrize(
    ("weights", "ranks"), [("fp8", 8), pytest.param("w4afp8", 4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("form", AttentionForm)
def test_deepseek_v3_fits_where_it_is_meant_to(
    full_size: FullSizes, weights: WeightFormat, ranks: int, form: AttentionForm
) -> None:
    plan = deepseek_v3(full_size(weights), ranks, form, max_running=128, chunk_tokens=4096)
    terms = by_name(plan)
    assert plan.total_bytes == sum(terms.values()) <= H200_BYTES
    assert terms[LIBRARIES] == LIBRARY_BYTES
    assert (GRAPHS in terms) == (form is DECODE)
    assert terms[KV] == plan.kv.num_pages * 61 * 64 * 576 * 2
    # 128 requests of 2,048 tokens, and more.
    assert plan.kv.num_pages > 128 * 2048 // 64
    # Nine tenths of what the others leave.
    left = H200_BYTES - (plan.total_bytes - terms[KV])
    assert terms[KV] == pytest.approx(0.9 * left, rel=1e-3)
    assert plan.kv.max_model_len == 163840


def test_groups_of_several_nodes(full_size: FullSizes) -> None:
    """Four nodes that prefill in long chunks, nine that decode, as the example of 96 GPUs has
    them: also where a GPU has 80 GB."""
    model, h100_bytes = full_size("fp8"), 79 * GIB
    long = by_name(deepseek_v3(model, 8, PREFILL, h100_bytes, nodes=4, chunk_tokens=16384))
    assert long["dispatch: rows by expert"] == 2 * 2 * 16384 * 8 * 7168 * 2
    assert long["dispatch: received tokens"] == 2 * 32 * 16384 * 7168 * 2
    decode = by_name(deepseek_v3(model, 8, DECODE, h100_bytes, nodes=9, max_running=256))
    assert decode["dispatch: masked rows"] == 2 * 4 * 72 * 256 * 7168 * 2
    assert "dispatch: rows by expert" not in decode
    # More nodes that prefill send in parts, and fit as well.
    deepseek_v3(model, 8, PREFILL, h100_bytes, nodes=20, chunk_tokens=32768)


def test_a_plan_that_does_not_fit_is_refused_with_the_largest_terms(
    full_size: FullSizes,
) -> None:
    with pytest.raises(ValueError, match="routed experts 152") as refusal:
        deepseek_v3(full_size("fp8"), 4, DECODE)
    text = str(refusal.value)
    assert text.count(" GiB,") == 2, "three terms are named"
    assert "of the 140.0 GiB of memory that a rank has" in text
    assert "--ranks" in text
    assert "w4afp8" in text


def test_a_refusal_says_what_other_processes_hold(full_size: FullSizes) -> None:
    held = {"memory_bytes": 105 * GIB, "others_bytes": 35 * GIB}
    with pytest.raises(ValueError, match=r"other processes hold 35\.0 GiB of its device"):
        deepseek_v3(full_size("fp8"), 8, DECODE, **held, kv_pages=10_000)
    plan = deepseek_v3(full_size("fp8"), 8, DECODE, **held)
    assert plan.total_bytes <= 105 * GIB


def test_pages_that_were_asked_for_and_do_not_fit_are_refused(
    full_size: FullSizes,
) -> None:
    with pytest.raises(ValueError, match=r"KV pages \d.*--kv-pages"):
        deepseek_v3(full_size("fp8"), 8, DECODE, kv_pages=100_000)
    with pytest.raises(ValueError, match=r"cannot hold one request.*the rest needs"):
        deepseek_v3(full_size("fp8"), 8, DECODE, 105 * GIB, max_model_len=163840, max_running=8)


def small(tmp_path: Path, memory_bytes: int, **told: Any) -> MemoryPlan:
    fields = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    sizes = {"hidden_size": 256, "vocab_size": 1000, "num_hidden_layers": 4} | fields
    write_config(tmp_path, weights="bf16", sizes=sizes)
    return plan_memory(
        WorkerSettings(model=tmp_path, **told),
        ModelConfig.from_folder(tmp_path),
        weights=[MemoryTerm(name="weights: all", num_bytes=GIB)],
        dispatch=[MemoryTerm(name="dispatch: rows", num_bytes=GIB // 4)],
        graph_sizes=(),
        num_slots=8,
        itemsize=4,
        memory_bytes=memory_bytes,
    )


def test_a_cpu_has_neither_graphs_nor_a_device_of_its_own(tmp_path: Path) -> None:
    plan = small(tmp_path, 64 * GIB, max_model_len=4096)
    assert {term.name for term in plan.terms} == {
        "weights: all", "dispatch: rows", ACTIVATIONS, KV
    }  # fmt: skip
    assert plan.terms[-1].name == KV
    assert by_name(plan)[KV] <= GIB, "a host keeps memory for others"


def test_kv_gets_its_share_of_what_is_left(tmp_path: Path) -> None:
    device = {"device": "cuda", "max_running": 4096}
    others = sum(by_name(small(tmp_path, 64 * GIB, **device)).values())
    others -= by_name(small(tmp_path, 64 * GIB, **device))[KV]
    for fraction in (0.25, 0.5):
        plan = small(tmp_path, 16 * GIB, kv_memory_fraction=fraction, **device)
        left = 16 * GIB - others
        page = plan.kv.page_bytes
        assert left * fraction - page < by_name(plan)[KV] <= left * fraction


def test_what_was_used_stands_beside_what_was_planned(tmp_path: Path) -> None:
    plan = small(tmp_path, 64 * GIB)
    used = {"weights: all": GIB + 1, KV: 5, "nothing planned": 7}
    assert plan.with_used(used) == (
        ("weights: all", GIB, GIB + 1),
        (KV, by_name(plan)[KV], 5),
    )


def test_scratch_grows_with_what_a_step_may_hold(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write_config(tmp_path, weights="fp8"))

    def scratch(**told: Any) -> int:
        settings = WorkerSettings(model=tmp_path, device="cuda", **told)
        return activation_bytes(settings, config, itemsize=2, masked_rows=0)

    base = scratch(chunk_tokens=4096)
    assert scratch(chunk_tokens=8192) > 1.5 * base
    # [T, 24576 + 2 x 16384 + ...] of attention alone.
    assert base > 4096 * (2 * 24576 + 2 * 16384) * 2
    settings = WorkerSettings(model=tmp_path, device="cuda")
    assert activation_bytes(settings, config, itemsize=2, masked_rows=10**6) >= 3 * 2048 * 2 * 10**6
    logits = 4 * 128 * config.vocab_size
    assert logits < graph_bytes(settings, config, (1, 128), 2) < logits + GIB


def test_recorded_steps_are_for_decode_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))

    def sizes(form: AttentionForm = DECODE, **told: Any) -> tuple[int, ...]:
        return recorded_sizes(WorkerSettings(model=tmp_path, **told), form)

    assert sizes(device="cuda", max_running=20) == (1, 2, 4, 8, 16, 20)
    assert sizes(device="cuda", max_running=20, cuda_graph_max_batch=4) == (1, 2, 4)
    assert sizes(device="cuda", max_running=3, cuda_graph_max_batch=64) == (1, 2, 3)
    assert sizes(device="cuda", cuda_graph_batch_sizes=(2, 32)) == (2, 32)
    assert sizes(device="cuda", max_running=3, speculative_tokens=1) == (1, 2, 2, 3, 4, 6)
    # So many draft nothing.
    told = {"max_running": 256, "cuda_graph_batch_sizes": (64, 256), "speculative_tokens": 1}
    assert sizes(device="cuda", **told) == (64, 128, 256)
    assert sizes(device="cuda", cuda_graph=False) == ()
    assert sizes(PREFILL, device="cuda") == ()
    assert sizes() == ()
    alone = WorkerSettings(model=tmp_path, device="cuda")
    assert recorded_passes(alone, PREFILL)
    monkeypatch.setenv("EPSERVE_KERNELS", "reference")
    assert sizes(device="cuda", max_running=20) == recorded_passes(alone, PREFILL) == ()
