"""Projections that stay in FP8 against the same ones dequantised."""

from pathlib import Path

import pytest
import torch

from kernels.elementwise.quantise import quantise
from kernels.elementwise.rms_norm import rms_norm, rms_norms
from kernels.gemm.block_dequantise import block_dequantise
from model.batch import AttentionForm
from model.deepseek import DeepseekV3
from model.projection import Projection
from model.weights.checkpoint import Checkpoint
from model.weights.weights import LinearForm, Weights
from tests.model.decode_rows import norm_error
from tests.model.driver import PagedRunner, load_all
from tests.model.random_folder import make_random_folder, quantise_blocks

CPU = torch.device("cpu")
PROMPT = {0: [5 + i % 280 for i in range(40)]}


def random_projection(n: int, k: int, *, bias: bool) -> tuple[Projection, torch.Tensor]:
    """An FP8 one, and its weight in float32."""
    rng = torch.Generator().manual_seed(n + k)
    weight, scale = quantise_blocks(torch.randn(n, k, generator=rng))
    projection = Projection(
        weight=weight,
        scale=scale,
        bias=torch.randn(n, generator=rng) if bias else None,
        dtype=torch.float32,
    )
    return projection, block_dequantise(weight, scale, torch.float32)


@pytest.mark.parametrize(("n", "k", "bias"), [(192, 256, True), (576, 128, False)])
def test_the_error_is_that_of_quantised_activations(n: int, k: int, bias: bool) -> None:
    projection, weight = random_projection(n, k, bias=bias)
    x = torch.randn(9, k, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ weight.double().t()
    if projection.bias is not None:
        exact += projection.bias.double()
    got = projection.forward(x)
    assert got.dtype == torch.float32
    assert 1e-4 < norm_error(got, exact) < 0.04
    assert torch.equal(projection.forward(quantise(x)), got)


def test_norms_give_what_forward_takes() -> None:
    projection, weight = random_projection(128, 256, bias=False)
    plain = Projection(weight=weight, dtype=torch.float32)
    rng = torch.Generator().manual_seed(0)
    x, residual, factors = (torch.randn(*shape, generator=rng) for shape in ((5, 256),) * 3)
    factors = factors[0]
    assert torch.equal(plain.normed(x, factors, 1e-6), rms_norm(x, factors, 1e-6))
    normed, total = plain.add_normed(x, residual, factors, 1e-6)
    assert torch.equal(normed, rms_norms(x, residual, factors, 1e-6)[0])
    quantised, same = projection.add_normed(x, residual, factors, 1e-6)
    assert torch.equal(total, same)
    assert norm_error(projection.forward(quantised), plain.forward(normed)) < 0.04
    once = projection.forward(projection.normed(x, factors, 1e-6))
    assert norm_error(once, plain.forward(rms_norm(x, factors, 1e-6))) < 0.04


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_folder(
        tmp_path_factory.mktemp("fp8"), fp8=True, num_hidden_layers=2, first_k_dense_replace=2
    )


def weights_of(folder: Path, linear: LinearForm, device: str = "cpu") -> Weights:
    return Weights(
        checkpoint=Checkpoint(folder),
        device=torch.device(device),
        dtype=torch.bfloat16,
        linear=linear,
    )


def test_who_keeps_fp8(folder: Path) -> None:
    assert weights_of(folder, "fp8").keeps_fp8
    assert not weights_of(folder, "auto").keeps_fp8
    assert not weights_of(folder, "plain", "cuda").keeps_fp8
    assert weights_of(folder, "auto", "cuda").keeps_fp8


def test_stacked_blocks_stay_blocks(folder: Path) -> None:
    prefix = "model.layers.0.self_attn"
    q_a, kv_a = f"{prefix}.q_a_proj.weight", f"{prefix}.kv_a_proj_with_mqa.weight"
    with weights_of(folder, "fp8").checkpoint as checkpoint:
        weights = Weights(checkpoint=checkpoint, device=CPU, dtype=torch.float32, linear="fp8")
        both = weights.projection(q_a, kv_a)  # 128 rows, then 96
        assert both.scale is not None
        assert both.scale.shape == (2, 2)
        whole = block_dequantise(both.weight, both.scale, torch.float32)
        assert torch.equal(whole[:128], weights.get(q_a))
        assert torch.equal(whole[128:], weights.get(kv_a))
        # The other way round the second one's blocks would begin in the middle of a block.
        assert not weights.projection(kv_a, q_a).is_fp8
        assert not weights.projection(q_a, kv_a, plain=True).is_fp8
        assert not weights.projection("lm_head.weight").is_fp8


def logits(model: DeepseekV3) -> torch.Tensor:
    runner = PagedRunner(model)
    first = runner.forward(PROMPT, AttentionForm.PLAIN, all_rows=True)
    return torch.cat((first, runner.forward({0: [7]}, AttentionForm.ABSORBED)))


def test_a_model_with_fp8_projections(folder: Path) -> None:
    """Two layers of some 4% error for each product; weights are exactly the same."""
    plain, fp8 = load_all(folder), load_all(folder, linear="fp8")
    assert fp8.layers[0].attention.q_kv_a.is_fp8
    assert fp8.layers[1].mlp.down.is_fp8
    want, got = logits(plain), logits(fp8)
    assert 1e-4 < norm_error(got, want) < 0.1


def test_latents_are_expanded_by_what_is_stored(tmp_path: Path) -> None:
    """For the plain form only. It adds one more product to those that have some 4% error."""
    fields = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "kv_lora_rank": 128}
    folder = make_random_folder(tmp_path, fp8=True, **fields)
    want = logits(load_all(folder))
    plain, absorbed = (load_all(folder, linear="fp8", form=form) for form in AttentionForm)
    assert absorbed.layers[0].attention.expanding_kv_b[1] is None
    weight, scale = plain.layers[0].attention.expanding_kv_b
    assert scale is not None
    exact = block_dequantise(weight.flatten(0, 1), scale, torch.float32)
    assert torch.equal(exact.view(weight.shape), plain.layers[0].attention.kv_b)
    errors = [norm_error(logits(model), want) for model in (absorbed, plain)]
    assert 1e-4 < errors[0] < 0.1
    assert abs(errors[1] - errors[0]) < 0.04


def test_rotated_rows_in_another_order(tmp_path: Path) -> None:
    """They would leave their blocks: such projections are not kept in FP8."""
    fields = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "rope_interleave": False}
    model = load_all(make_random_folder(tmp_path, fp8=True, **fields), linear="fp8")
    attention = model.layers[0].attention
    assert not attention.q_kv_a.is_fp8
    assert attention.q_b is not None
    assert not attention.q_b.is_fp8
    assert attention.out.is_fp8
