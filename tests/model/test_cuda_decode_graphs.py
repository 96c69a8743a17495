"""Decode steps recorded as CUDA graphs, as a decode rank records them: on a GPU."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.ranks.deepseek_v3_config import SMALL, write_config
from engine.step.decode_graphs import DecodeGraphs
from engine.step.graph_capture import CudaCapture, RepeatedCall
from engine.step.sequence_chunk import SequenceChunk
from model.deepseek import DeepseekV3
from model.known_models import WeightFormat
from model.weights.dummy_checkpoint import DummyCheckpoint
from tests.model.decode_rows import norm_error

pytestmark = pytest.mark.gpu

SIZES = (1, 4, 16)
PAGE_TOKENS, MAX_PAGES = 64, 6


def load(folder: Path, weights: WeightFormat) -> DeepseekV3:
    # Sizes that FP8 blocks, int4 groups and kernels of Hopper like.
    sizes = SMALL | {
        "hidden_size": 512, "intermediate_size": 512, "q_lora_rank": 256, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_attention_heads": 16,
    }  # fmt: skip
    write_config(folder, weights=weights, num_layers=3, sizes=sizes)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
    return DeepseekV3.load(
        folder, device="cuda", dtype=torch.bfloat16, source=DummyCheckpoint(folder, "cuda")
    )


def steps(rng: random.Random, vocab_size: int) -> Iterator[list[SequenceChunk]]:
    """Batches of changing sizes; requests at random places of random pages."""
    for _ in range(12):
        batch = rng.randint(1, SIZES[-1])
        pages = rng.sample(range(SIZES[-1] * MAX_PAGES), batch * MAX_PAGES)
        yield [
            SequenceChunk(
                token_ids=[rng.randrange(vocab_size)],
                start=rng.randrange(PAGE_TOKENS * MAX_PAGES),
                pages=pages[row * MAX_PAGES : (row + 1) * MAX_PAGES],
            )
            for row in range(batch)
        ]


@pytest.mark.parametrize("weights", ["bf16", "fp8", "w4afp8", "w4afp8-static"])
def test_replays_equal_calls(tmp_path: Path, weights: WeightFormat) -> None:
    """The same kernels with the same inputs, whatever was replayed before; libraries may sum in
    another order while they are recorded."""
    model = load(tmp_path, weights)
    shape = (3, SIZES[-1] * MAX_PAGES, PAGE_TOKENS, model.config.kv_dim)
    cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    caches = [cache, cache.clone()]
    captures = [CudaCapture(torch.device("cuda", torch.cuda.current_device())), RepeatedCall()]
    recorded, called = (
        DecodeGraphs(
            model.decode, one, sizes=SIZES, max_pages=MAX_PAGES,
            vocab_size=model.config.vocab_size, capture=capture,
        )
        for one, capture in zip(caches, captures, strict=True)
    )  # fmt: skip
    recorded.capture_all()
    called.capture_all()
    assert torch.equal(*caches), "recording writes nothing"
    assert recorded.num_bytes > 0
    for pieces in steps(random.Random(0), model.config.vocab_size):
        size = recorded.padded_size((len(pieces),))
        assert size is not None
        got, want = recorded.run(pieces, size), called.run(pieces, size)
        assert got.isfinite().all()
        assert norm_error(got, want) < 1e-3
        assert norm_error(*caches) < 1e-3


def test_steps_may_be_enqueued_far_ahead_of_the_device(tmp_path: Path) -> None:
    """Inputs of a step that is not over yet are not overwritten by those of later ones."""
    model = load(tmp_path, "fp8")
    shape = (3, SIZES[-1] * MAX_PAGES, PAGE_TOKENS, model.config.kv_dim)
    cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    graphs = DecodeGraphs(
        model.decode, cache, sizes=SIZES, max_pages=MAX_PAGES,
        vocab_size=model.config.vocab_size,
        capture=CudaCapture(torch.device("cuda", torch.cuda.current_device())),
    )  # fmt: skip
    graphs.capture_all()
    batches = list(steps(random.Random(1), model.config.vocab_size))
    before = cache.clone()

    def run(wait: bool) -> list[torch.Tensor]:
        cache.copy_(before)
        found = []
        if not wait:
            torch.cuda._sleep(200_000_000)
        for pieces in batches:
            size = graphs.padded_size((len(pieces),))
            assert size is not None
            found.append(graphs.run(pieces, size).clone())
            if wait:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return found

    for ahead, one_by_one in zip(run(wait=False), run(wait=True), strict=True):
        assert torch.equal(ahead, one_by_one)
