"""The proof that the numbers are right: random configurations against transformers, in float32.

Each configuration is run whole, in chunks, and over a cached prefix, in both attention forms, on
ragged batches over shuffled pages; then 32 tokens are continued greedily from each of these.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.batch import AttentionForm
from tests.model.driver import PAGE_TOKENS, PagedRunner, load_all
from tests.model.public_models import PUBLIC, make_public_model
from tests.model.random_config import NUM_CONFIGS, prompt_lengths, random_config
from tests.model.reference import (
    assert_close,
    load_reference,
    reference_greedy,
    reference_logits,
)
from tests.tiny_checkpoint import make_tiny_checkpoint

NUM_CONTINUED = 32
NUM_IN_SHORT = 10  # each switch both ways, each variant of YaRN

Prompts = dict[int, list[int]]
Prefill = Callable[[PagedRunner, Prompts, AttentionForm, random.Random], dict[int, torch.Tensor]]


def whole(
    runner: PagedRunner, prompts: Prompts, form: AttentionForm, rng: random.Random
) -> dict[int, torch.Tensor]:
    """All prompts in one ragged batch."""
    logits = runner.forward(prompts, form, all_rows=True)
    parts = logits.split([len(ids) for ids in prompts.values()])
    return dict(zip(prompts, parts, strict=True))


def chunked(
    runner: PagedRunner, prompts: Prompts, form: AttentionForm, rng: random.Random
) -> dict[int, torch.Tensor]:
    """Random pieces of each, several prompts in one batch, in changing order."""
    left = dict(prompts)
    parts: dict[int, list[torch.Tensor]] = {name: [] for name in prompts}
    while left:
        names = rng.sample(sorted(left), len(left))
        chunks = {name: left[name][: rng.choice((1, 7, 16, 50, 130))] for name in names}
        logits = whole(runner, chunks, form, rng)
        for name, chunk in chunks.items():
            parts[name].append(logits[name])
            left[name] = left[name][len(chunk) :]
        left = {name: ids for name, ids in left.items() if ids}
    return {name: torch.cat(part) for name, part in parts.items()}


def prefixed(
    runner: PagedRunner, prompts: Prompts, form: AttentionForm, rng: random.Random
) -> dict[int, torch.Tensor]:
    """A sequence that ends otherwise leaves its pages; the prompt starts from some of them."""
    logits = {}
    for name, ids in prompts.items():
        num_pages = rng.randint(0, (len(ids) - 1) // PAGE_TOKENS)
        cached = num_pages * PAGE_TOKENS
        donor = name + 1000
        head = runner.forward({donor: [*ids[:cached], 3, 3]}, form, all_rows=True)[:cached]
        runner.share(donor, name, num_pages)
        tail = runner.forward({name: ids[cached:]}, form, all_rows=True)
        logits[name] = torch.cat((head, tail))
    return logits


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, marks=[pytest.mark.slow] if index >= NUM_IN_SHORT else [])
        for index in range(NUM_CONFIGS)
    ],
)
def test_logits_and_greedy_tokens(tmp_path: Path, index: int) -> None:
    rng = random.Random(index)
    fields = random_config(index)
    folder = make_tiny_checkpoint(tmp_path, seed=index, num_shards=1 + index % 3, **fields)
    reference, model = load_reference(folder), load_all(folder)
    prompts = {
        name: [rng.randrange(fields["vocab_size"]) for _ in range(length)]
        for name, length in enumerate(prompt_lengths(index))
    }
    want = {name: reference_logits(reference, ids) for name, ids in prompts.items()}
    tokens = {
        name: reference_greedy(reference, ids, NUM_CONTINUED) for name, ids in prompts.items()
    }
    prefills: tuple[Prefill, ...] = (whole, chunked, prefixed)
    for prefill in prefills:
        for form in AttentionForm:
            what = f"config {index}, {prefill.__name__}, {form.value}"
            runner = PagedRunner(model, seed=index)
            logits = prefill(runner, prompts, form, rng)
            for name, got in logits.items():
                assert_close(got, want[name], f"{what}, {len(prompts[name])} tokens")
            first = {name: int(got[-1].argmax()) for name, got in logits.items()}
            # Decoding is in absorbed form; plain form has to agree on it, which one run shows.
            decode = form if prefill is whole else AttentionForm.ABSORBED
            assert runner.greedy(first, NUM_CONTINUED, decode) == tokens, what


def test_demo_sized_model_over_long_context(tmp_path: Path) -> None:
    """Several query blocks, groups of unlike lengths, and pages of 64 tokens."""
    folder = make_tiny_checkpoint(tmp_path, num_hidden_layers=2)
    reference, model = load_reference(folder), load_all(folder)
    rng = random.Random(0)
    prompts = {name: [rng.randrange(260) for _ in range(n)] for name, n in enumerate((1500, 9))}
    runner = PagedRunner(model, page_tokens=64)
    got = whole(runner, prompts, AttentionForm.PLAIN, rng)
    for name, ids in prompts.items():
        assert_close(got[name], reference_logits(reference, ids), f"{len(ids)} tokens")
    first = {name: int(logits[-1].argmax()) for name, logits in got.items()}
    want = {name: reference_greedy(reference, ids, 8) for name, ids in prompts.items()}
    assert runner.greedy(first, 8, AttentionForm.ABSORBED) == want


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_of_the_same_code(tmp_path: Path, name: str) -> None:
    reference = make_public_model(tmp_path, name)
    model = load_all(tmp_path)
    ids = [random.Random(0).randrange(260) for _ in range(150)]
    for form in AttentionForm:
        got = whole(PagedRunner(model), {0: ids}, form, random.Random(0))[0]
        assert_close(got, reference_logits(reference, ids), f"{name}, {form.value}")


def test_only_wanted_rows(tmp_path: Path) -> None:
    """`logit_rows` may be any tokens, in any order, or none at all."""
    model = load_all(make_tiny_checkpoint(tmp_path))
    runner = PagedRunner(model)
    ids = list(range(4, 44))
    every = runner.forward({0: ids}, AttentionForm.PLAIN, all_rows=True)
    for rows in ([39], [5, 0, 17], []):
        wanted = torch.tensor(rows, dtype=torch.int64)
        batch = runner.batch({len(rows) + 1: ids}, AttentionForm.PLAIN)
        got = model.forward(replace(batch, logit_rows=wanted), runner.cache)
        torch.testing.assert_close(got, every[wanted], rtol=1e-5, atol=1e-5)
        assert runner.greedy({len(rows) + 1: 7}, 3, AttentionForm.ABSORBED)


def test_layers_are_announced_once_their_latents_are_written(tmp_path: Path) -> None:
    model = load_all(make_tiny_checkpoint(tmp_path))
    runner = PagedRunner(model)
    batch = runner.batch({0: [5, 6, 7]}, AttentionForm.PLAIN)
    seen: list[tuple[int, list[int]]] = []

    def on_layer(layer: int) -> None:
        flat = runner.cache.flatten(1, 2)
        filled = [i for i in range(len(flat)) if bool((flat[i, batch.slots] != 0).all())]
        seen.append((layer, filled))

    model.forward(batch, runner.cache, on_layer)
    assert seen == [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])]
    written = torch.zeros(runner.cache[0].flatten(0, 1).shape[0], dtype=torch.bool)
    written[batch.slots] = True
    assert not runner.cache.flatten(1, 2)[:, ~written].any(), "wrote outside its slots"
