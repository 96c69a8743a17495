"""Floors of a decode step: by hand for a small model, and those of the breakdowns in git."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import step_operations as ops
from bench.deepseek_v3_config import WeightFormat, write_config
from bench.records import RESULTS
from bench.small_config import SMALL
from bench.step_breakdown import Kernel, write_breakdown
from bench.step_floor import StepFloor
from bench.step_kernels import OTHER, PURPOSE_OF_OPERATION, operations_of, purpose_of
from bench.step_operations import BF16_FLOPS, Operation, decode_operations
from bench.step_refloor import main as refloor
from kernels.moe.w4a8_grouped_gemm_packing import BLOCK_BYTES, READ_BYTES
from model.batch import AttentionForm
from model.config import ModelConfig
from model.weight_bytes import ATTENTION, DENSE, EXPERTS, SCALES, VOCABULARY, planned_weights
from model.weights.dummy_checkpoint import DummyCheckpoint
from model.weights.weights import Weights

DECODE = sorted((RESULTS / "details").glob("decode_rank_*.json"))
PREFILL = sorted((RESULTS / "details").glob("prefill_rank_*.json"))
# A gigabyte a second: a thousand bytes are a microsecond.
SLOW = 1e9


def small(folder: Path, weights: WeightFormat, batch: int) -> dict[str, Operation]:
    """Three layers, the first without experts; 8 experts here; 99 tokens in front of each row."""
    write_config(folder, weights=weights, num_layers=3, sizes=SMALL)
    config = ModelConfig.from_folder(folder)
    found = decode_operations(config, weights=weights, num_slots=8, batch=batch, context=99)
    return {each.name: each for each in found}


def floors(operations: dict[str, Operation]) -> dict[str, float]:
    return {each.name: each.floor_microseconds(SLOW) for each in operations.values()}


def test_floors_of_few_rows_are_what_memory_has(tmp_path: Path) -> None:
    found = floors(small(tmp_path, "w4afp8", 1))
    # 128 + 64 + 16 rows of 256, and a float32 of each 128 x 128, in three layers.
    assert found[ops.QUERIES_AND_LATENTS] == pytest.approx(3 * (208 * 256 + 4 * 2 * 2) / 1e3)
    assert found[ops.OUTPUT] == pytest.approx(3 * (256 * 128 + 4 * 2) / 1e3)
    assert found[ops.SHARED_UP] == pytest.approx(2 * (256 * 256 + 4 * 4) / 1e3)
    assert found[ops.DENSE_DOWN] == pytest.approx((256 * 384 + 4 * 6) / 1e3)
    # Half of kv_b in BF16: 4 heads of 32 x 64.
    assert (
        found[ops.FOLDED_QUERIES] == found[ops.VALUES] == pytest.approx(3 * 2 * 4 * 32 * 64 / 1e3)
    )
    # 100 tokens of 64 + 16.
    assert found[ops.ATTENTION] == pytest.approx(3 * 2 * 100 * 80 / 1e3)
    # Four of the eight get a row: 4 bits a value, and 16 for 128.
    assert found[ops.EXPERTS_UP] == pytest.approx(2 * 4 * 256 * 256 * (0.5 + 2 / 128) / 1e3)
    assert found[ops.EXPERTS_DOWN] == pytest.approx(2 * 4 * 256 * 128 * (0.5 + 2 / 128) / 1e3)
    assert found[ops.ROUTER] == pytest.approx(2 * 2 * 64 * 256 / 1e3)
    assert found[ops.LOGITS] == pytest.approx(2 * 512 * 256 / 1e3)


def test_floors_of_what_only_moves_rows(tmp_path: Path) -> None:
    found = floors(small(tmp_path, "w4afp8", 2))
    assert found[ops.FIRST_NORM] == pytest.approx(2 * 256 * (2 + 1) / 1e3)
    assert found[ops.QUERY_NORMS] == pytest.approx(3 * 2 * 128 * (2 + 1) / 1e3)
    # Two in, their sum, and the result in both types; the dense layer's without the wide one.
    assert found[ops.ATTENTION_NORMS] == pytest.approx(2 * 2 * 256 * (2 + 2 + 2 + 2 + 1) / 1e3)
    assert found[ops.DENSE_NORMS] == pytest.approx(2 * 2 * 256 * (2 + 2 + 2 + 1) / 1e3)
    assert found[ops.EXPERT_NORMS] == pytest.approx(2 * 2 * 256 * (2 + 2 + 2 + 1) / 1e3)
    # 4 rows of each token, the shared expert's, and the result.
    assert found[ops.COMBINATION] == pytest.approx(2 * 2 * 256 * 2 * (4 + 1 + 1) / 1e3)
    assert found[ops.PLACEMENT] == pytest.approx(2 * 2 * 256 * (1 + 4) / 1e3)
    assert found[ops.SHARED_ACTIVATION] == pytest.approx(2 * 2 * 128 * (2 + 2 + 1) / 1e3)
    assert found[ops.GATE] == pytest.approx(2 * 2 * (4 * 64 + 20 * 4) / 1e3)
    assert ops.EXPERTS_ACTIVATION not in found, "the product in front activates"


def test_norms_combine_many_rows(tmp_path: Path) -> None:
    few, many = (floors(small(tmp_path, "fp8", batch)) for batch in (16, 17))
    assert ops.COMBINATION in few
    assert ops.COMBINATION not in many
    assert many[ops.EXPERT_NORMS] == pytest.approx(2 * 17 * 256 * (7 + 2 * 4) / 1e3)
    # In FP8 the activation is a launch of its own.
    assert many[ops.EXPERTS_ACTIVATION] == pytest.approx(2 * 17 * 4 * 128 * (2 + 2 + 1) / 1e3)


def test_arithmetic_and_rows_bind_where_they_take_longer(tmp_path: Path) -> None:
    found = small(tmp_path, "w4afp8", 128)
    attention = found[ops.ATTENTION]
    assert attention.flops == 2 * 4 * 128 * 100 * (80 + 64)
    fast = attention.floor_microseconds(1e30)
    assert fast == pytest.approx(1e6 * 3 * attention.flops / BF16_FLOPS)
    # 128 rows of 4 heads: 48 values in, 80 out, and a latent in and out.
    rows = 2 * 128 * (4 * 48 + 4 * 80 + 2 * 80)
    assert found[ops.FOLDED_QUERIES].floor_microseconds(SLOW) == pytest.approx(3 * rows / 1e3)


@pytest.mark.parametrize("weights", ["fp8", "w4afp8"])
def test_all_weights_are_read_once(tmp_path: Path, weights: WeightFormat) -> None:
    found = small(tmp_path, weights, 2)
    checkpoint = DummyCheckpoint(tmp_path, "cpu")
    held = Weights(
        checkpoint=checkpoint, device=torch.device("cpu"), dtype=torch.bfloat16, linear="fp8",
        form=AttentionForm.ABSORBED,
    )  # fmt: skip
    config = ModelConfig.from_folder(tmp_path)
    planned = {each.name: each.num_bytes for each in planned_weights(held, config, num_slots=8)}
    read = sum(
        each.count * each.memory_bytes
        for each in found.values()
        if each.name not in (ops.ATTENTION, ops.ROUTER)
    )
    matrices = sum(planned[term] for term in (ATTENTION, DENSE, SCALES))
    # Of int4 blocks no units, of the embedding only a step's own rows.
    share = READ_BYTES / BLOCK_BYTES if weights == "w4afp8" else 1
    assert read == pytest.approx(matrices + share * planned[EXPERTS] + planned[VOCABULARY] / 2)


def test_kernels_are_believed_when_they_come_as_often(tmp_path: Path) -> None:
    found = tuple(small(tmp_path, "w4afp8", 1).values())
    assert operations_of("_absorb_query", 3, found) == (ops.FOLDED_QUERIES,)
    assert operations_of("_absorb_query", 4, found) == ()
    assert operations_of("_quantise", 3, found) == (ops.DENSE_ACTIVATION, ops.SHARED_ACTIVATION)
    assert operations_of("nothing that is known", 3, found) == ()
    assert set(PURPOSE_OF_OPERATION) >= {each.name for each in found}
    floor = StepFloor(operations=found, bytes_per_second=SLOW)
    names, least = floor.of_kernel("_absorb_query", 3)
    assert (names, least) == ((ops.FOLDED_QUERIES,), pytest.approx(3 * 2 * 4 * 32 * 64 / 1e3))
    assert floor.of_kernel("_absorb_query", 4) == ((), None)
    assert floor.of_purpose(OTHER) is None
    assert floor.of_step == pytest.approx(sum(each.floor_microseconds(SLOW) for each in found))


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.parametrize("path", DECODE, ids=[path.stem for path in DECODE])
def test_all_kernels_in_git_are_known(path: Path) -> None:
    content = read(path)
    computed: list[str] = []
    for kernel in content["kernels"]:
        computed += kernel["operations"]
        assert kernel["purpose"] == purpose_of(kernel["name"])
        if kernel["purpose"] == OTHER:  # what is done once, before the first layer
            assert kernel["name"].startswith(("void at::native::", "Memset")), kernel["name"]
            assert (kernel["count"] <= 2, kernel["floor"]) == (True, None)
            continue
        assert kernel["operations"], f"add to bench.step_kernels: {kernel['name']}"
        # What only reads is faster than a copy: of 4.8 TB/s that has 4.2, logits of one row 4.6.
        assert 0 < kernel["floor"] < 1.1 * kernel["microseconds"]
    assert len(computed) == len(set(computed)), "an operation is computed once"
    for purpose in content["purposes"]:
        of_kernels = [
            each["floor"] for each in content["kernels"] if each["purpose"] == purpose["purpose"]
        ]
        whole = None if None in of_kernels else pytest.approx(sum(of_kernels), rel=1e-3)
        assert purpose["floor"] == whole
    together = sum(each["floor"] or 0 for each in content["purposes"])
    assert content["floor"] == pytest.approx(together, rel=1e-3)


@pytest.mark.parametrize("path", DECODE + PREFILL, ids=[path.stem for path in DECODE + PREFILL])
def test_breakdowns_in_git_are_what_would_be_written(tmp_path: Path, path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    assert refloor([str(copy)]) == 0
    assert copy.read_text() == path.read_text()


def test_measured_times_outlive_other_floors(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    kernels = [Kernel(name="_absorb_query", count=61, microseconds=2172.875)]
    write_breakdown(path, "w4afp8, 61 layers, context 2048, batch 128", kernels)
    assert read(path)["kernels"][0]["floor"] is None
    with pytest.raises(ValueError, match="no rate"):
        refloor([str(path)])
    assert refloor([str(path), "--bytes-per-second", "1e12"]) == 0
    (kernel,) = read(path)["kernels"]
    assert (kernel["microseconds"], kernel["count"]) == (2172.875, 61)
    # 128 rows: 128 heads of 192 values in and 576 out, 576 in and out.
    assert kernel["floor"] == pytest.approx(61 * 2 * 128 * (128 * 768 + 2 * 576) / 1e6, rel=1e-4)


def test_the_rate_that_is_written_gives_the_same_floors_again(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    kernels = [Kernel(name="_absorb_query", count=61, microseconds=2172.875)]
    for rate in (4.214350001e12, 4.214449999e12):
        write_breakdown(path, "w4afp8, 61 layers, context 2048, batch 128", kernels)
        assert refloor([str(path), "--bytes-per-second", f"{rate}"]) == 0
        written = path.read_text()
        assert refloor([str(path)]) == 0
        assert path.read_text() == written
