"""Decode steps of fixed sizes against the passes that they stand for, everything but the recording
itself: padding, static buffers, sizes agreed between ranks, ranks with nothing to do."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.step.decode_graphs import DecodeGraphs, graph_sizes
from engine.step.graph_capture import RepeatedCall, Step
from engine.step.sequence_chunk import SequenceChunk
from ep.dispatch.collective import CollectiveDispatcher
from ep.dispatch.expert_shard import ExpertShard
from ep.group.group import EpGroup
from ep.placement.placement import Placement
from model.batch import AttentionForm, DecodeBatch, ForwardBatch
from model.deepseek import DeepseekV3
from tests.ep.thread_ranks import Meeting, on_all_ranks
from tests.model.driver import PAGE_TOKENS, PagedRunner, load_all
from tests.tiny_checkpoint import make_tiny_checkpoint

SIZES = (1, 2, 4, 6)
MAX_PAGES = 8
NUM_STEPS = 12


@dataclass
class Counted(RepeatedCall):
    """Counts what is recorded and what is replayed, in order."""

    replayed: list[int] = field(default_factory=list)
    num_recorded: int = 0

    def __call__(self, step: Step) -> Step:
        index = self.num_recorded
        self.num_recorded += 1
        again = super().__call__(step)

        def replay() -> None:
            self.replayed.append(index)
            again()

        return replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def graphs_of(model: DeepseekV3, cache: torch.Tensor, capture: RepeatedCall) -> DecodeGraphs:
    graphs = DecodeGraphs(
        model.decode,
        cache,
        sizes=SIZES,
        max_pages=MAX_PAGES,
        vocab_size=model.config.vocab_size,
        capture=capture,
    )
    graphs.capture_all()
    return graphs


class Requests:
    """Random requests of one rank, prefilled into `runner`. All ranks have the same."""

    def __init__(self, model: DeepseekV3, seed: int, num_ranks: int = 1) -> None:
        self.rng = random.Random(seed)
        self.runner = PagedRunner(model, num_pages=64, seed=seed)
        prompts = {
            name: [
                self.rng.randrange(4, 260)
                for _ in range(self.rng.randint(1, PAGE_TOKENS * (MAX_PAGES - 2)))
            ]
            for name in range(SIZES[-1])
        }
        num_tokens = sum(map(len, prompts.values()))
        batch = self.runner.batch(
            prompts, AttentionForm.PLAIN, tokens_per_rank=(num_tokens,) * num_ranks
        )
        logits = model.forward(batch, self.runner.cache)
        self.next_token: dict[int, int] = dict(enumerate(logits.argmax(-1).tolist()))

    def step(
        self, names: Sequence[int], tokens_per_rank: tuple[int, ...]
    ) -> tuple[ForwardBatch, list[SequenceChunk]]:
        """The next token of each, ragged and as pieces."""
        chunks = {name: [self.next_token[name]] for name in names}
        batch = self.runner.batch(chunks, AttentionForm.ABSORBED, tokens_per_rank=tokens_per_rank)
        pieces = [
            SequenceChunk(token_ids=tokens, start=self.runner.lengths[name] - 1, pages=pages)
            for (name, tokens), pages in zip(
                chunks.items(), (self.runner.pages[name] for name in names), strict=True
            )
        ]
        return batch, pieces


def check_steps(
    requests: Requests,
    graphs: DecodeGraphs,
    graph_cache: torch.Tensor,
    sizes_of_step: Callable[[int], tuple[int, ...]],
    rank: int,
) -> None:
    """Random batches, their sizes told by `sizes_of_step`; same tokens and latents both ways."""
    runner = requests.runner
    for step in range(NUM_STEPS):
        tokens_per_rank = sizes_of_step(step)
        names = requests.rng.sample(range(SIZES[-1]), tokens_per_rank[rank])
        batch, pieces = requests.step(names, tokens_per_rank)
        want = runner.model.forward(batch, runner.cache)
        size = graphs.padded_size(tokens_per_rank)
        assert size == min(s for s in SIZES if s >= max(tokens_per_rank))
        got = graphs.run(pieces, size)
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        tokens = want.argmax(-1).tolist()
        assert got.argmax(-1).tolist() == tokens
        torch.testing.assert_close(graph_cache, runner.cache, rtol=1e-4, atol=1e-5)
        requests.next_token |= dict(zip(names, tokens, strict=True))


def test_random_batches_of_changing_sizes(folder: Path) -> None:
    model = load_all(folder)
    requests = Requests(model, 0)
    cache = requests.runner.cache.clone()
    capture = Counted()
    before = cache.clone()
    graphs = graphs_of(model, cache, capture)
    assert torch.equal(cache, before), "recording writes nothing anywhere"
    sizes = [(requests.rng.randint(1, SIZES[-1]),) for _ in range(NUM_STEPS)]
    check_steps(requests, graphs, cache, sizes.__getitem__, 0)
    assert capture.num_recorded == len(SIZES)
    # The largest is recorded first.
    assert [SIZES[::-1][index] for index in capture.replayed] == [
        graphs.padded_size(size) for size in sizes
    ]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_with_different_batches_and_with_none(folder: Path, num_ranks: int) -> None:
    rng = random.Random(num_ranks)
    sizes = [
        tuple(rng.choice((0, rng.randint(1, SIZES[-1]))) for _ in range(num_ranks))
        for _ in range(NUM_STEPS)
    ]
    sizes = [each if any(each) else (1, *each[1:]) for each in sizes]
    assert any(0 in each for each in sizes)

    def program(group: EpGroup, meeting: Meeting) -> None:
        del meeting
        placement = Placement.trivial(2, 8, num_ranks, num_redundant=2 * num_ranks - 8 % num_ranks)
        slots = placement.slots_per_rank
        model = load_all(
            folder,
            experts=ExpertShard.build(
                placement,
                group.rank,
                CollectiveDispatcher(group, slots),
                "cpu",
                masked=CollectiveDispatcher(group, slots, SIZES[-1]),
            ),
        )
        requests = Requests(model, 5, num_ranks)
        cache = requests.runner.cache.clone()
        requests.rng.seed(group.rank)
        check_steps(
            requests, graphs_of(model, cache, Counted()), cache, sizes.__getitem__, group.rank
        )

    on_all_ranks(num_ranks, program)


def test_tokens_may_come_from_the_device(folder: Path) -> None:
    model = load_all(folder)
    requests = Requests(model, 1)
    cache = requests.runner.cache.clone()
    graphs = graphs_of(model, cache, Counted())
    _, pieces = requests.step([2, 0, 3], (3,))
    want = graphs.run(pieces, 4).clone()
    ids = torch.tensor([piece.token_ids[0] for piece in pieces])
    hidden = [SequenceChunk(token_ids=(0,), start=one.start, pages=one.pages) for one in pieces]

    def put_in(token_ids: torch.Tensor) -> None:
        assert token_ids.shape == (4,)
        token_ids[:3] = ids

    assert torch.equal(graphs.run(hidden, 4, put_in), want)


def test_every_size_leaves_its_logits_in_one_place() -> None:
    seen: list[DecodeBatch] = []

    def decode(batch: DecodeBatch, cache: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        del cache
        seen.append(batch)
        return out.copy_(batch.positions[:, None])

    graphs = DecodeGraphs(
        decode, torch.zeros(1, 2, 4, 5), sizes=(1, 3), max_pages=2, vocab_size=3,
        capture=RepeatedCall(),
    )  # fmt: skip
    graphs.capture_all()
    assert [len(batch.token_ids) for batch in seen] == [3, 1]
    assert not any(batch.kv_lengths.any() for batch in seen)
    pieces = [SequenceChunk(token_ids=[1], start=start, pages=[0, 1]) for start in (4, 7)]
    logits = graphs.run(pieces, 3)
    assert logits.tolist() == [[4.0] * 3, [7.0] * 3]
    assert graphs.run([], 1).shape == (0, 3)
    assert logits.data_ptr() == graphs.run(pieces[1:], 1).data_ptr()
    assert logits[0].tolist() == [7.0] * 3
    assert seen[-1] is seen[1], "the batch that was recorded is the one that is filled"
    assert graphs.padded_size((0, 2)) == 3
    assert graphs.padded_size((1, 0)) == 1
    assert graphs.padded_size((4, 0)) is None


@pytest.mark.parametrize(
    ("told", "max_batch", "sizes"),
    [
        ((), 1, (1,)),
        ((), 6, (1, 2, 4, 6)),
        ((), 32, (1, 2, 4, 8, 16, 24, 32)),
        ((), 33, (1, 2, 4, 8, 16, 24, 32, 33)),
        ((8, 2, 8), 64, (2, 8)),
        ((8, 2, 128), 64, (2, 8)),
        ((128,), 64, ()),
    ],
)
def test_sizes(told: tuple[int, ...], max_batch: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(told, max_batch) == sizes
