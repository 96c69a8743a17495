"""The MTP layer against transformers' own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from core.errors import CheckpointError
from model.batch import AttentionForm
from model.config import ModelConfig, MtpUse
from model.deepseek import DeepseekV3
from tests.model.decode_rows import decode_batch
from tests.model.driver import PagedRunner, load_all
from tests.model.reference import assert_close, load_reference
from tests.tiny_checkpoint import make_tiny_checkpoint


def load_with_mtp(folder: Path, mtp: MtpUse = "whole") -> DeepseekV3:
    return load_all(folder, config=replace(ModelConfig.from_folder(folder), mtp=mtp))


@torch.no_grad()
def reference_mtp(folder: Path, ids: list[int]) -> torch.Tensor:
    """[len(ids) - 1, vocab]: at position i, for the token at i + 2."""
    main = load_reference(folder)
    # It knows the MTP layer of the public checkpoint only, number 61.
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{len(main.model.layers)}\..*"]
    mtp = MtpModel.from_pretrained(main).eval()
    hidden = main.model(torch.tensor([ids[:-1]])).last_hidden_state
    out = mtp.forward_layer(
        0, hidden, torch.arange(1, len(ids))[None], None, input_ids=torch.tensor([ids[1:]])
    )
    return main.lm_head(out)[0]


@pytest.mark.parametrize("tied", [False, True])
def test_against_transformers(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_checkpoint(tmp_path, num_nextn_predict_layers=1, tie_word_embeddings=tied)
    ids = [3 + (7 * i) % 250 for i in range(70)]
    want = reference_mtp(folder, ids)
    model = load_with_mtp(folder)
    assert model.mtp is not None
    for form in AttentionForm:
        main, draft = PagedRunner(model), PagedRunner(model)
        logits = []
        for start in range(0, len(ids) - 1, 23):
            stop = min(start + 23, len(ids) - 1)
            batch = main.batch({0: ids[start:stop]}, form)
            hidden = model.hidden_states(batch, main.cache)
            ahead = draft.batch({0: ids[start + 1 : stop + 1]}, form, all_rows=True)
            after = model.mtp.forward(ahead, hidden, main.cache[-1])
            logits.append(model.mtp.logits(after))
        assert_close(torch.cat(logits), want, form.value)


def test_embedding_and_head_are_the_main_ones(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, num_nextn_predict_layers=1)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.embed_tokens.weight"]
    del tensors["model.layers.3.shared_head.head.weight"]
    save_file(tensors, folder / "model.safetensors")
    model = load_with_mtp(folder)
    assert model.mtp is not None
    assert model.mtp.embedding is model.embedding
    assert model.mtp.head is model.head


def test_absent_or_incomplete(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no MTP layer, .* speculative-tokens must be 0"):
        load_with_mtp(folder)
    folder = make_tiny_checkpoint(tmp_path / "part", num_nextn_predict_layers=1)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    load_all(folder)  # the main model is whole
    for mtp in ("kv", "whole"):
        with pytest.raises(CheckpointError, match=r"missing: model\.layers\.3\.eh_proj\.weight"):
            load_with_mtp(folder, mtp)


def test_prefill_writes_what_the_layer_would(tmp_path: Path) -> None:
    """In two chunks, of which the layer never computes more than latents."""
    folder = make_tiny_checkpoint(tmp_path, num_nextn_predict_layers=1)
    ids = [3 + (7 * i) % 250 for i in range(50)]
    whole, short = (PagedRunner(load_with_mtp(folder, mtp)) for mtp in ("whole", "kv"))
    assert whole.model.mtp is not None
    batch = whole.batch({0: ids}, AttentionForm.PLAIN)
    states = whole.model.hidden_states(batch, whole.cache)
    ahead = replace(batch, token_ids=torch.tensor([*ids[1:], 0]))
    whole.model.mtp.forward(ahead, states, whole.cache[-1])
    for begin, end in ((0, 20), (20, 50)):
        written: list[int] = []
        batch = short.batch({0: ids[begin:end]}, AttentionForm.PLAIN)
        batch = replace(batch, following=torch.tensor([*ids, 0][begin + 1 : end + 1]))
        logits = short.model.forward(batch, short.cache, written.append)
        assert written == [*range(short.model.config.num_kv_layers)]
    torch.testing.assert_close(short.cache, whole.cache, rtol=1e-4, atol=1e-5)
    assert_close(logits, whole.model.head.forward_wide(states[-1:]), "logits")
    nothing = replace(short.batch({}, AttentionForm.PLAIN), following=torch.tensor([], dtype=int))
    assert short.model.forward(nothing, short.cache).shape == (0, whole.model.config.vocab_size)


def test_decode_equals_the_forward_pass(tmp_path: Path) -> None:
    """Rows of two positions of a request among them, and padding."""
    model = load_with_mtp(make_tiny_checkpoint(tmp_path, num_nextn_predict_layers=1))
    assert model.mtp is not None
    runner = PagedRunner(model)
    prompts = {n: [3 + n + (7 * i) % 250 for i in range(9 + n)] for n in range(3)}
    batch = runner.batch(prompts, AttentionForm.PLAIN)
    runner.model.forward(replace(batch, following=batch.token_ids), runner.cache)
    batch = runner.batch({n: [7 + n] for n in range(3)}, AttentionForm.ABSORBED)
    rows, fixed = decode_batch(batch, 5), runner.cache.clone()
    states = torch.empty(5, model.config.hidden_size)
    model.decode(rows, fixed, states=states)
    want = model.hidden_states(batch, runner.cache)
    torch.testing.assert_close(states[:3], want, rtol=1e-4, atol=1e-5)
    after = model.mtp.forward(batch, want, runner.cache[-1])
    got = model.mtp.decode(rows, states, fixed[-1])[:3]
    torch.testing.assert_close(got, after, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fixed, runner.cache, rtol=1e-4, atol=1e-5)
    assert_close(model.mtp.logits(got), model.mtp.logits(after), "logits")
