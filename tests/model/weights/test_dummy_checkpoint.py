"""Random weights in place of a checkpoint: of the right form, the same everywhere, and such that
what is computed with them is like what a trained model computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from model.batch import AttentionForm, ForwardBatch
from model.config import ModelConfig
from model.deepseek import DeepseekV3
from model.weights.checkpoint import Checkpoint
from model.weights.dummy_checkpoint import DummyCheckpoint, dummy_tensors
from model.weights.int4 import dequantise_int4
from tests.tiny_checkpoint import TINY_CONFIG, make_tiny_checkpoint

SIZES = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "n_routed_experts": 16,
    "initializer_range": 0.02,
}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4: dict[str, Any] = {"quant_method": "w4afp8"}
AWQ: dict[str, Any] = {"quant_method": "awq"}
METHODS = [None, FP8, INT4, INT4 | {"moe_activation_scheme": "static"}, AWQ]
PAGE = 16


def config_folder(folder: Path, quantization: dict[str, Any] | None, **overrides: Any) -> Path:
    fields = TINY_CONFIG | SIZES | {"model_type": "deepseek_v3"} | overrides
    if quantization is not None:
        fields["quantization_config"] = quantization
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def load(folder: Path) -> DeepseekV3:
    return DeepseekV3.load(
        folder, device="cpu", dtype=torch.float32, source=DummyCheckpoint(folder)
    )


def prompt_batch(num_tokens: int) -> ForwardBatch:
    num_pages = -(-num_tokens // PAGE)
    every = torch.arange(num_tokens)
    generator = torch.Generator().manual_seed(0)
    return ForwardBatch(
        token_ids=torch.randint(0, 260, (num_tokens,), generator=generator),
        positions=every,
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        kv_lengths=torch.tensor([num_tokens], dtype=torch.int32),
        block_table=torch.arange(num_pages, dtype=torch.int32)[None],
        slots=every,
        logit_rows=every,
        form=AttentionForm.PLAIN,
        tokens_per_rank=(num_tokens,),
    )


@pytest.mark.parametrize("quantization", METHODS)
def test_it_is_what_a_checkpoint_of_this_config_must_be(
    tmp_path: Path, quantization: dict[str, Any] | None
) -> None:
    few = {"num_hidden_layers": 2, "n_routed_experts": 8}
    folder = config_folder(tmp_path, quantization, num_nextn_predict_layers=1, **few)
    dummy = DummyCheckpoint(folder)
    config = ModelConfig.from_folder(folder)
    dummy.check(config)
    dummy.check_mtp(config)
    for name, stored in dummy.stored.items():
        value = dummy.raw(name)
        assert tuple(value.shape) == stored.shape, name
        assert value.nbytes == dummy.num_bytes(name), name
        assert value.float().isfinite().all(), name
        assert torch.equal(value.float(), DummyCheckpoint(folder).raw(name).float()), name


@pytest.mark.parametrize("fp8", [False, True])
def test_headers_are_those_of_a_checkpoint_that_was_written(tmp_path: Path, fp8: bool) -> None:
    dtype = torch.bfloat16
    folder = make_tiny_checkpoint(tmp_path, fp8=fp8, dtype=dtype, num_nextn_predict_layers=1)
    written = {
        name: (stored.dtype, stored.shape)
        for name, stored in Checkpoint(folder).stored.items()
        # MTP layers share these two.
        if not name.endswith(("3.embed_tokens.weight", "3.shared_head.head.weight"))
    }
    made = {name: (s.dtype, s.shape) for name, s in dummy_tensors(folder).items()}
    assert made == written


def spread_of_fp8_blocks() -> float:
    """Standard deviation of normal values in blocks of 128 x 128 whose largest becomes 448."""
    blocks = torch.randn(100, 128 * 128)
    return float((448 * blocks / blocks.abs().amax(dim=1, keepdim=True)).std())


@pytest.mark.parametrize("quantization", [None, FP8])
def test_matrices_keep_the_size_of_what_they_are_multiplied_with(
    tmp_path: Path, quantization: dict[str, Any] | None
) -> None:
    dummy = DummyCheckpoint(config_folder(tmp_path, quantization))
    for name in ("self_attn.q_b_proj", "mlp.gate_proj", "mlp.down_proj"):
        matrix = dummy.read(f"model.layers.0.{name}.weight", torch.float32)
        assert float(matrix.std()) * matrix.shape[1] ** 0.5 == pytest.approx(1, rel=0.1)
        assert abs(float(matrix.mean())) < 0.1 * float(matrix.std())
        if quantization is not None:
            # As scales by each block's largest make it.
            values = dummy.raw(f"model.layers.0.{name}.weight").float()
            assert 300 < float(values.abs().max()) <= 448
            assert float(values.std()) == pytest.approx(spread_of_fp8_blocks(), rel=0.05)


def test_int4_matrices_do_too(tmp_path: Path) -> None:
    dummy = DummyCheckpoint(config_folder(tmp_path, INT4))
    stored, scales = dummy.read_int4("model.layers.1.mlp.experts.3.gate_proj.weight")
    matrix = dequantise_int4(stored, scales)
    assert float(matrix.std()) * matrix.shape[1] ** 0.5 == pytest.approx(1, rel=0.1)
    assert abs(float(matrix.mean())) < 0.1 * float(matrix.std())


def test_int4_values_are_those_of_quantised_groups(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, INT4, hidden_size=512)
    stored, scales = DummyCheckpoint(folder).read_int4(
        "model.layers.1.mlp.experts.3.gate_proj.weight"
    )
    values = dequantise_int4(stored, torch.ones_like(scales)).unflatten(1, (-1, 128))
    assert (values.abs().amax(dim=-1) == 7).all()
    matrix = torch.randn(4096, 128)
    expected = (matrix / (matrix.abs().amax(dim=-1, keepdim=True) / 7)).round()
    assert float(values.std()) == pytest.approx(float(expected.std()), rel=0.03)
    for value in range(-7, 8):
        share = float((expected == value).float().mean())
        assert float((values == value).float().mean()) == pytest.approx(share, rel=0.1, abs=3e-3)


@pytest.mark.parametrize("quantization", METHODS)
def test_tokens_spread_over_experts_and_stay_apart(
    tmp_path: Path, quantization: dict[str, Any] | None
) -> None:
    torch.set_num_threads(1)
    model = load(config_folder(tmp_path, quantization))
    config, num_tokens = model.config, 192
    cache = torch.zeros(config.num_layers, 12, PAGE, config.kv_dim)
    batch = prompt_batch(num_tokens)
    with torch.inference_mode():
        hidden = model.run_layers(batch, cache, None, None)
        logits = model.logits(hidden)
    assert logits.isfinite().all()
    assert 0.5 < float(logits.std()) < 4
    assert 0.5 < float(hidden.std()) < 8
    similarity = torch.nn.functional.cosine_similarity(hidden[:, None], hidden[None], dim=-1)
    repeated = batch.token_ids[:, None] == batch.token_ids[None]
    assert float(similarity[~repeated].mean()) < 0.5
    choices = num_tokens * config.experts_per_token
    for counts in model.experts.counts:
        assert int(counts.sum()) == choices
        assert int((counts > 0).sum()) == config.num_experts
        assert int(counts.max()) < 5 * choices / config.num_experts


def test_experts_are_the_same_whichever_rank_holds_them(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, FP8)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    first, second = DummyCheckpoint(folder), DummyCheckpoint(folder)
    second.raw("model.embed_tokens.weight")  # in whatever order they are read
    assert torch.equal(first.read(name, torch.float32), second.read(name, torch.float32))
    other = first.read(name.replace("experts.5", "experts.6"), torch.float32)
    assert not torch.equal(first.read(name, torch.float32), other)
