"""The decode step of fixed sizes on a GPU: against the CPU, as a captured graph, in FP8."""

from pathlib import Path

import pytest
import torch

from model.attention import plan as attention_plan
from model.batch import AttentionForm, DecodeBatch
from model.deepseek import DeepseekV3
from tests.model.decode_rows import decode_batch, norm_error, row_error
from tests.model.driver import PagedRunner, load_all
from tests.model.random_folder import make_random_folder

pytestmark = pytest.mark.gpu

PROMPTS = {0: [5 + i % 280 for i in range(700)], 1: [9], 2: list(range(4, 68)), 3: [3] * 65}
SIZE, PAGES = 8, 16
FIELDS = ("token_ids", "positions", "kv_lengths", "block_table", "slots")
# Latents and heads as FlashMLA and the tiles of our own kernel want them.
LARGE = {
    "num_hidden_layers": 2, "num_attention_heads": 128, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_folder(tmp_path_factory.mktemp("decode"), fp8=True)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_folder(tmp_path_factory.mktemp("large"), **LARGE)


def prefilled(model: DeepseekV3) -> PagedRunner:
    runner = PagedRunner(model, page_tokens=64)
    runner.forward(PROMPTS, AttentionForm.PLAIN)
    return runner


def step(model: DeepseekV3) -> torch.Tensor:
    """Logits [rows, vocab] of one more token for each prompt."""
    runner = prefilled(model)
    batch = runner.batch(dict.fromkeys(PROMPTS, [7]), AttentionForm.ABSORBED)
    logits = model.decode(decode_batch(batch, SIZE, PAGES), runner.cache)
    assert logits.isfinite().all()
    return logits[: len(PROMPTS)].cpu()


def test_float32_equals_the_cpu(folder: Path) -> None:
    want = step(load_all(folder))
    got = step(load_all(folder, device="cuda"))
    assert norm_error(got, want) < 1e-3


@pytest.mark.parametrize(("linear", "error"), [("plain", 0.1), ("fp8", 0.3)])
def test_bfloat16_is_near(folder: Path, linear: str, error: float) -> None:
    want = step(load_all(folder))
    got = step(load_all(folder, device="cuda", dtype=torch.bfloat16, linear=linear))
    assert row_error(got, want) < error


@pytest.mark.parametrize("name", ["folder", "large"])
def test_equals_the_forward_pass(request: pytest.FixtureRequest, name: str) -> None:
    path = request.getfixturevalue(name)
    model = load_all(path, device="cuda", dtype=torch.bfloat16)
    runner = prefilled(model)
    batch = runner.batch(dict.fromkeys(PROMPTS, [7]), AttentionForm.ABSORBED)
    ragged = runner.cache.clone()
    want = model.forward(batch, ragged)
    got = model.decode(decode_batch(batch, SIZE, PAGES), runner.cache)[: len(PROMPTS)]
    assert row_error(got, want) < 0.1
    assert norm_error(runner.cache, ragged) < 0.2
    kept = torch.ones(ragged.shape[1] * 64, dtype=torch.bool, device="cuda")
    kept[batch.slots] = False
    assert torch.equal(runner.cache.flatten(1, 2)[:, kept], ragged.flatten(1, 2)[:, kept])


@pytest.mark.parametrize("name", ["folder", "large"])
def test_a_graph_follows_what_changes(request: pytest.FixtureRequest, name: str) -> None:
    """Captured with padding only, replayed with rows, other rows, and padding again: as the step
    without a graph."""
    path = request.getfixturevalue(name)
    model = load_all(path, device="cuda", dtype=torch.bfloat16)
    runner = prefilled(model)
    nothing = decode_batch(runner.batch({}, AttentionForm.ABSORBED), SIZE, PAGES)
    fixed = DecodeBatch(**{name: getattr(nothing, name).clone() for name in FIELDS})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            model.decode(fixed, runner.cache)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        logits = model.decode(fixed, runner.cache)

    for chunks in ({0: [7], 1: [8]}, {2: [11], 3: [12], 0: [13], 1: [14]}, {}, {3: [1]}):
        batch = decode_batch(runner.batch(chunks, AttentionForm.ABSORBED), SIZE, PAGES)
        eager = runner.cache.clone()
        want = model.decode(batch, eager)[: len(chunks)]
        for field in FIELDS:
            getattr(fixed, field).copy_(getattr(batch, field))
        graph.replay()
        torch.cuda.synchronize()
        got = logits[: len(chunks)]
        assert logits.isfinite().all()
        if chunks:
            assert row_error(got, want) < 1e-2
        assert norm_error(runner.cache, eager) < 0.1


@pytest.mark.parametrize("most", [300, 10**6])
@pytest.mark.parametrize(("fp8", "error"), [(False, 0.1), (True, 0.3)])
def test_plain_and_absorbed_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, fp8: bool, error: float
) -> None:
    """Two chunks of each prompt, the second behind a cached prefix; keys in one group or several;
    absorbed rows of different lengths, then of equal ones. In FP8 latents are expanded by kv_b as
    it is stored, in plain form only."""
    monkeypatch.setattr(attention_plan, "max_keys", lambda *_: most)
    folder = make_random_folder(tmp_path, fp8=fp8, **LARGE)
    model = load_all(folder, device="cuda", dtype=torch.bfloat16)
    assert (model.layers[0].attention.expanding_kv_b[1] is not None) == fp8

    def logits(form: AttentionForm) -> torch.Tensor:
        runner = PagedRunner(model, page_tokens=64)
        first = {name: ids[: len(ids) // 2] for name, ids in PROMPTS.items() if len(ids) > 1}
        second = {name: ids[len(ids) // 2 :] for name, ids in PROMPTS.items()}
        third = {name: [5, 6, 7] for name in PROMPTS}
        chunks = (first, second, third)
        return torch.cat([runner.forward(chunk, form, all_rows=True) for chunk in chunks])

    plain, absorbed = logits(AttentionForm.PLAIN), logits(AttentionForm.ABSORBED)
    assert plain.isfinite().all()
    assert row_error(plain, absorbed) < error


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_that_are_wanted_are_as_among_all(tmp_path: Path, fp8: bool) -> None:
    """Of the last layer only they are computed. Chunks end behind cached prefixes, too."""
    folder = make_random_folder(tmp_path, fp8=fp8, **LARGE)
    model = load_all(folder, device="cuda", dtype=torch.bfloat16)
    first = {name: ids[: len(ids) // 2] for name, ids in PROMPTS.items() if len(ids) > 1}
    second = {name: ids[len(ids) // 2 :] for name, ids in PROMPTS.items()}
    runners = [PagedRunner(model, page_tokens=64) for _ in range(2)]
    for chunk in (first, second):
        whole = runners[0].forward(chunk, AttentionForm.PLAIN, all_rows=True)
        wanted = runners[1].forward(chunk, AttentionForm.PLAIN)
        ends = torch.tensor([len(ids) for ids in chunk.values()]).cumsum(0) - 1
        assert row_error(wanted, whole[ends.cuda()]) < (0.3 if fp8 else 0.1)
        assert norm_error(runners[1].cache, runners[0].cache) < 1e-2
