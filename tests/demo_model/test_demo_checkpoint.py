"""The checkpoint that ships: its format, its size and its answers on CPU."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config
from transformers.modeling_layers import MtpModel

from demo_model.training.checkpoint import (
    load_network,
    public_weights,
    read_weights,
    save_checkpoint,
)
from demo_model.training.corpus import chatter_set, evaluation_set
from demo_model.training.evaluate import is_right
from demo_model.training.network import config_values
from demo_model.training.reference import Reference
from demo_model.training.settings import CHECKPOINT_PATH, Settings

FOLDER_BYTES = 12_000_000


@pytest.fixture(scope="module")
def reference() -> Reference:
    torch.set_num_threads(1)
    return Reference()


def test_folder_is_small_enough() -> None:
    folder = CHECKPOINT_PATH.parent
    files = [
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    ]
    assert sum(path.stat().st_size for path in files) <= FOLDER_BYTES


def test_tensors_are_those_of_the_public_format() -> None:
    index = json.loads((CHECKPOINT_PATH / "model.safetensors.index.json").read_text())
    dtypes, shapes = {}, {}
    for file_name in set(index["weight_map"].values()):
        with safe_open(CHECKPOINT_PATH / file_name, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 not a dict
                part = shard.get_slice(name)
                dtypes[name], shapes[name] = part.get_dtype(), part.get_shape()
                assert index["weight_map"][name] == file_name
    assert set(dtypes) == set(index["weight_map"])
    experts = "model.layers.{}.mlp.experts.15.down_proj.weight"
    assert shapes[experts.format(1)] == shapes[experts.format(4)] == [256, 128]
    assert shapes[experts.format(1) + "_scale_inv"] == [2, 1]
    assert "model.layers.0.mlp.gate_proj.weight" in dtypes
    for name, dtype in dtypes.items():
        if name.endswith("_scale_inv"):
            assert dtype == "F32"
            assert dtypes[name.removesuffix("_scale_inv")] == "F8_E4M3"
        elif name.endswith("e_score_correction_bias"):
            assert dtype == "F32"
        elif len(shapes[name]) == 1 or name.endswith(
            ("embed_tokens.weight", "head.weight", "gate.weight", "eh_proj.weight")
        ):
            assert dtype == "BF16"
        else:
            assert dtype == "F8_E4M3"
            assert f"{name}_scale_inv" in dtypes
    mtp = {name for name in dtypes if name.startswith("model.layers.4.")}
    for name in ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm"):
        assert f"model.layers.4.{name}.weight" in mtp
    assert "model.layers.4.shared_head.head.weight" in mtp


def test_config_is_what_the_settings_say() -> None:
    expected = DeepseekV3Config(**config_values(Settings.load().sizes)).to_dict()
    actual = DeepseekV3Config.from_pretrained(CHECKPOINT_PATH).to_dict()
    for name in ("architectures", "_name_or_path", "quantization_config"):
        actual.pop(name, None)
        expected.pop(name, None)
    assert actual == expected
    assert actual["max_position_embeddings"] == 4096


def test_balancing_bias_was_trained() -> None:
    weights = read_weights(CHECKPOINT_PATH)
    for layer in (1, 2, 3, 4):
        bias = weights[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        assert bias.std() > 0.01


def test_answers_twenty_held_out_questions(reference: Reference) -> None:
    conversations = [*evaluation_set(17), *chatter_set(3)]
    replies = reference.answer(conversations)
    wrong = [r for c, r in zip(conversations, replies, strict=True) if not is_right(c, r)]
    assert wrong == []
    assert replies[0] == conversations[0].turns[-1].reply


def test_mtp_layer_foresees_the_token_after_next(reference: Reference) -> None:
    assert reference.mtp_acceptance(evaluation_set(8)) > 0.95


def test_mtp_layer_means_what_transformers_takes_it_to_mean(reference: Reference) -> None:
    network = reference.network
    theirs = MtpModel(network.main, 1).eval()
    layer = theirs.layers[0]
    for module in ("enorm", "hnorm", "eh_proj"):
        getattr(layer, module).load_state_dict(getattr(network.mtp, module).state_dict())
    layer.mtp_block.load_state_dict(network.mtp.block.state_dict())
    layer.post_norm.load_state_dict(network.mtp.norm.state_dict())
    conversation = evaluation_set(1)[0]
    text = conversation.prompt() + conversation.turns[-1].reply
    tokens = torch.tensor([reference.tokenizer.encode(text, add_special_tokens=False).ids])
    with torch.inference_mode():
        hidden, ahead = network.states(tokens, None)
        positions = torch.arange(tokens.shape[1] - 1)[None]
        expected = theirs.forward_layer(0, hidden[:, :-1], positions, None, input_ids=tokens[:, 1:])
    torch.testing.assert_close(ahead[:, :-1], expected, rtol=1e-4, atol=1e-4)


def test_saving_what_was_loaded_changes_nothing(
    reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("again")
    save_checkpoint(reference.network, Settings.load().sizes, folder)
    again = public_weights(load_network(folder))
    for name, tensor in public_weights(reference.network).items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-6, atol=1e-9, msg=name)
    assert (folder / "config.json").read_text() == (CHECKPOINT_PATH / "config.json").read_text()


@pytest.mark.parametrize("suffix", ["", "_scale_inv"])
def test_a_missing_tensor_is_named(tmp_path_factory: pytest.TempPathFactory, suffix: str) -> None:
    folder = tmp_path_factory.mktemp("broken")
    missing = f"model.layers.1.self_attn.o_proj.weight{suffix}"
    tensors: dict[str, torch.Tensor] = {}
    for path in CHECKPOINT_PATH.iterdir():
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
    del tensors[missing]
    save_file(tensors, folder / "all.safetensors")
    (folder / "config.json").symlink_to(CHECKPOINT_PATH / "config.json")
    index = {"weight_map": dict.fromkeys(tensors, "all.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        load_network(folder)
