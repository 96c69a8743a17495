"""Recorded prefill passes against the passes that they stand for: on a CPU all but the recording
itself, on a GPU as a prefill rank records them."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.sampling.sampler import SampleRow
from engine.sampling.sampling_params import Sampling
from engine.step.graph_capture import Capture, CudaCapture, RepeatedCall
from engine.step.prefill_graphs import PrefillGraphs, can_record, prefill_sizes
from engine.step.runner import Runner
from engine.step.sequence_chunk import SequenceChunk
from ep.dispatch.expert_shard import ExpertShard
from ep.dispatch.local import LocalDispatcher
from ep.placement.placement import Placement
from model.batch import AttentionForm, ForwardBatch
from model.config import ModelConfig
from model.deepseek import DeepseekV3
from tests.model.decode_rows import norm_error
from tests.model.driver import load_all
from tests.model.random_folder import make_random_folder

SIZES = (8, 24, 40)
NUM_PAGES, PAGE_TOKENS = 60, 8


def load(folder: Path, device: str) -> DeepseekV3:
    """Experts as on a rank of a GPU that has them all."""
    config = ModelConfig.from_folder(folder)
    placement = Placement.trivial(config.num_moe_layers, config.num_experts, 1)
    shard = ExpertShard.build(
        placement, 0, LocalDispatcher(config.num_experts), device,
        aligned=LocalDispatcher(config.num_experts),
    )  # fmt: skip
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return DeepseekV3.load(folder, device=device, dtype=dtype, experts=shard)


def passes_of(rng: random.Random, vocab_size: int) -> Iterator[list[SequenceChunk]]:
    """Ragged chunks of a few requests, at random pages; some end a prompt, some do not."""
    pages = rng.sample(range(NUM_PAGES), NUM_PAGES)
    lengths = [0, 0, 0]
    for _ in range(12):
        pieces = []
        for row in rng.sample(range(3), rng.randint(1, 3)):
            count = rng.randint(1, 13)
            sample = SampleRow(sampling=Sampling(), position=lengths[row] + count)
            pieces.append(
                SequenceChunk(
                    token_ids=[rng.randrange(vocab_size) for _ in range(count)],
                    start=lengths[row],
                    pages=pages[20 * row : 20 * row + 20],
                    sample=sample if rng.random() < 0.7 else None,
                )
            )
            lengths[row] += count
        yield pieces


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equals_the_whole_pass(tmp_path: Path, device: str) -> None:
    model = load(make_random_folder(tmp_path, num_hidden_layers=3), device)
    config = model.config
    shape = (config.num_layers, NUM_PAGES, PAGE_TOKENS, config.kv_dim)
    cache = torch.zeros(shape, dtype=model.embedding.dtype, device=device)
    caches = [cache, cache.clone()]
    on_gpu = device == "cuda"
    capture: Capture = CudaCapture(cache.device) if on_gpu else RepeatedCall()
    recorded = PrefillGraphs(model, caches[0], sizes=SIZES, capture=capture)
    recorded.capture_all()
    assert recorded.num_bytes > 0
    assert not caches[0].any(), "recording writes nothing"
    assert not model.experts.counts.any(), "and counts nothing"
    short = Runner(model, caches[0], AttentionForm.PLAIN, passes=recorded)
    plain = Runner(model, caches[1], AttentionForm.PLAIN)
    # In bfloat16 a gate that is nearly even may turn.
    bound = 0.1 if on_gpu else 1e-5
    for pieces in passes_of(random.Random(0), config.vocab_size):
        count = (sum(len(piece.token_ids) for piece in pieces),)
        counts, written = [], ([], [])
        for which, runner in enumerate((short, plain)):
            model.experts.counts.zero_()
            logits = runner.forward(pieces, count, written[which].append)
            counts.append((logits, model.experts.counts.clone()))
        (got, got_counts), (want, want_counts) = counts
        assert got.shape == want.shape
        assert written[0] == written[1] == [0, 1, 2]
        if len(want):
            assert norm_error(got, want) < bound
        assert norm_error(*caches) < bound
        if not on_gpu:
            assert torch.equal(got_counts, want_counts)


def test_what_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_random_folder(tmp_path, num_hidden_layers=2)
    assert not can_record(load_all(folder)), "its dispatcher looks at the counts"
    model = load(folder, "cpu")
    cache = torch.zeros(2, NUM_PAGES, PAGE_TOKENS, model.config.kv_dim)
    recorded = PrefillGraphs(model, cache, sizes=SIZES, capture=RepeatedCall())
    recorded.capture_all()
    seen: list[int] = []
    hidden_rows = recorded.hidden_rows

    def spy(batch: ForwardBatch, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        seen.append(len(batch.token_ids))
        return hidden_rows(batch, on_layer)

    monkeypatch.setattr(recorded, "hidden_rows", spy)
    runner = Runner(model, cache, AttentionForm.PLAIN, passes=recorded)
    for length in (1, SIZES[-1], SIZES[-1] + 1):
        piece = SequenceChunk(token_ids=[5] * length, start=0, pages=range(6))
        runner.forward([piece], (length,))
    assert seen == [1, SIZES[-1]]
    assert prefill_sizes(0) == ()
    assert prefill_sizes(300) == (64, 128, 256)
