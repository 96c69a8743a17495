"""The trainer's parts, at a scale that a CPU can bear."""

import random

import pytest
import torch
from tokenizers import Tokenizer
from transformers import DeepseekV3Config

from demo_model.training.batches import BatchSource, make_batch, pack
from demo_model.training.block_fp8 import dequantise_blocks, quantise_blocks, rounded
from demo_model.training.network import Network, config_values, packed_mask, use_dense_experts
from demo_model.training.settings import CHECKPOINT_PATH, ModelSizes, Settings, Training
from demo_model.training.train import Trainer, learning_rate

TINY = ModelSizes(
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=8,
)
SMALL = Training(rows=2, row_tokens=256, warmup_steps=1, long_share=0.0, learning_rate=1e-2)
TOKENIZER_PATH = CHECKPOINT_PATH / "tokenizer.json"


def tiny_network() -> Network:
    torch.manual_seed(0)
    return Network(DeepseekV3Config(**config_values(TINY))).eval()


def test_settings_file_holds_the_defaults(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert Settings.load() == Settings()
    path = tmp_path_factory.mktemp("settings") / "bad.json"
    path.write_text('{"sizes": {"hidden": 1}, "training": {}}')
    with pytest.raises(ValueError, match="hidden"):
        Settings.load(path)


def test_packing_keeps_documents_whole() -> None:
    documents = [([10 + n] * n, [n % 2 == 0] * n) for n in (3, 5, 8, 4, 4, 9)]
    batch = pack(documents, num_rows=4, row_tokens=10)
    found = []
    for row, segments in enumerate(batch.segments):
        for number in range(1, segments.max() + 1):
            tokens = batch.tokens[row][segments == number].tolist()
            marks = batch.learned[row][segments == number].tolist()
            found.append((tokens, marks))
    assert sorted(found) == sorted(documents)


def test_batches_of_both_kinds_are_nearly_full() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_PATH))
    for share, shape in ((0.0, (32, 384)), (1.0, (3, 4096))):
        training = Training(rows=32, row_tokens=384, long_share=share)
        batch = make_batch(random.Random(0), tokenizer, training)
        assert batch.tokens.shape == shape
        assert (batch.segments > 0).mean() > 0.7
        assert not batch.learned[batch.segments == 0].any()


def test_producers_deliver_and_stop() -> None:
    with BatchSource(TOKENIZER_PATH, SMALL, num_processes=1) as source:
        assert source.next().tokens.shape == (2, 256)
        process = source._processes[0]
    assert not process.is_alive()


def test_packed_rows_equal_documents_alone() -> None:
    network = tiny_network()
    tokens = torch.randint(0, TINY.vocab_size, (1, 40))
    segments = torch.tensor([[1] * 15 + [2] * 25])
    with torch.inference_mode():
        packed = network.states(tokens, packed_mask(segments, torch.float32))
        alone = network.states(tokens[:, 15:], None)
    torch.testing.assert_close(packed[0][:, 15:], alone[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[1][:, 15:-1], alone[1][:, :-1], rtol=1e-4, atol=1e-5)


def test_dense_experts_equal_those_of_transformers() -> None:
    network = tiny_network()
    tokens = torch.randint(0, TINY.vocab_size, (2, 30))
    for layer in network.moe_layers():
        layer.gate.e_score_correction_bias.uniform_(-0.3, 0.3)
    with torch.inference_mode():
        expected = network.states(tokens, None)
        use_dense_experts(network)
        actual = network.states(tokens, None)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    load = network.moe_layers()[0].experts.load
    assert load.sum() == tokens.numel() * TINY.num_experts_per_tok


def test_training_lowers_the_loss_and_moves_the_balancing_bias() -> None:
    torch.set_num_threads(1)
    trainer = Trainer(Settings(sizes=TINY, training=SMALL), "cpu")
    tokenizer = Tokenizer.from_file(str(TOKENIZER_PATH))
    batch = make_batch(random.Random(0), tokenizer, SMALL)
    first = trainer.step(batch, 0.0)
    gate = trainer.network.moe_layers()[0].gate
    moved = gate.e_score_correction_bias.abs()
    assert ((moved == 0) | (moved == SMALL.bias_rate)).all()
    assert moved.any()
    for _ in range(8):
        last = trainer.step(batch, 0.6)
    assert (last < first - 1.0).all()
    frozen = gate.e_score_correction_bias.clone()
    trainer.step(batch, SMALL.bias_until)
    assert torch.equal(gate.e_score_correction_bias, frozen)


def test_learning_rate_warms_up_and_falls() -> None:
    training = Training(warmup_steps=10, learning_rate=1.0, final_learning_rate=0.1)
    assert learning_rate(training, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(training, 9, 0.0) == pytest.approx(1.0)
    assert learning_rate(training, 100, 0.5) == pytest.approx(0.55)
    assert learning_rate(training, 100, 1.0) == pytest.approx(0.1)


@pytest.mark.parametrize("shape", [(128, 128), (144, 256), (3, 256, 130), (1, 1)])
def test_block_fp8_is_within_half_a_step(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-3, 1, shape[-1])
    stored, scale = quantise_blocks(weight)
    assert scale.shape[-2:] == (-(-shape[-2] // 128), -(-shape[-1] // 128))
    block = weight[..., :128, :128]
    torch.testing.assert_close(scale[..., 0, 0] * 448, block.abs().amax((-2, -1)))
    error = (dequantise_blocks(stored, scale)[..., :128, :128] - block).abs()
    # e4m3 keeps three bits behind the point; below 2^-6 of its scale, steps of 2^-9.
    bound = torch.maximum(block.abs() / 16, scale[..., :1, :1] * 2**-10)
    assert (error <= bound * 1.001).all()


def test_zero_blocks_survive() -> None:
    stored, scale = quantise_blocks(torch.zeros(130, 5))
    assert torch.equal(dequantise_blocks(stored, scale), torch.zeros(130, 5))


def test_rounded_gives_the_exact_values_back() -> None:
    parameter = torch.nn.Parameter(torch.randn(8, 8))
    exact = parameter.detach().clone()
    with rounded([parameter]):
        assert torch.equal(parameter, dequantise_blocks(*quantise_blocks(exact)))
        assert not torch.equal(parameter, exact)
    assert torch.equal(parameter, exact)
