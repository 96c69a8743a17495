"""The last layer computes what logits are wanted of, and no more."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ep.dispatch.expert_shard import ExpertShard
from ep.placement.placement import Placement
from model.attention import plan as attention_plan
from model.attention.plan import AttentionPlan, wanted_rows
from model.batch import AttentionForm, ForwardBatch
from tests.model.driver import PagedRunner, load_all
from tests.model.moe.thread_dispatcher import Meeting, ThreadDispatcher
from tests.model.random_folder import make_random_folder
from tests.tiny_checkpoint import make_tiny_checkpoint

PREFIX = {0: [3, 5, 8, 13], 1: [21] * 30}
EXPERTS = 3  # of a token, in the tiny checkpoint
CHUNKS = {0: [7 + i % 80 for i in range(37)], 1: [2], 2: [9] * 20}


def test_rows_that_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In absorbed form, behind cached prefixes: as all rows in plain form."""
    monkeypatch.setattr(attention_plan, "WANTED_SHARE", 2)
    model = load_all(make_random_folder(tmp_path, num_hidden_layers=2))
    build, counts = AttentionPlan.build, []

    def with_wanted(batch: ForwardBatch, *arguments: object) -> AttentionPlan:
        wanted = wanted_rows(batch, model.config.num_heads)
        counts.append(0 if wanted is None else len(wanted.kv_lengths))
        return replace(build(batch, *arguments), wanted=wanted)  # type: ignore[arg-type]

    logits, caches = [], []
    for plan in (build, with_wanted):
        monkeypatch.setattr(AttentionPlan, "build", plan)
        runner = PagedRunner(model)
        runner.forward(PREFIX, AttentionForm.PLAIN)
        logits.append(runner.forward(CHUNKS, AttentionForm.PLAIN))
        caches.append(runner.cache)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(caches[1], caches[0])
    assert counts == [2, 3]


def test_no_more_than_a_share(tmp_path: Path) -> None:
    runner = PagedRunner(load_all(make_random_folder(tmp_path, num_hidden_layers=1)))
    batch = runner.batch(CHUNKS, AttentionForm.PLAIN)
    found = wanted_rows(batch, 8)
    assert found is not None
    assert found.kv_lengths.tolist() == [37, 1, 20]
    assert torch.equal(found.block_table, batch.block_table)
    assert wanted_rows(replace(batch, tokens_per_rank=(58, 0)), 8) is None
    assert wanted_rows(replace(batch, logit_rows=torch.arange(4)), 8) is None
    assert wanted_rows(replace(batch, logit_rows=batch.logit_rows[:0]), 8) is None
    # Rows without new tokens are nobody's.
    starts = torch.tensor([0, 0, 37, 37, 58], dtype=torch.int32)
    wanted = wanted_rows(replace(batch, query_start=starts, block_table=torch.arange(4)[:, None],
                                 logit_rows=torch.tensor([36, 57])), 8)  # fmt: skip
    assert wanted is not None
    assert wanted.block_table.tolist() == [[1], [3]]


def test_a_chunk_without_logits_writes_the_same(tmp_path: Path) -> None:
    model = load_all(make_random_folder(tmp_path, num_hidden_layers=2))
    runners = [PagedRunner(model) for _ in range(2)]
    batches = [runner.batch(CHUNKS, AttentionForm.PLAIN) for runner in runners]
    batches[1] = replace(batches[1], logit_rows=batches[1].logit_rows[:0])
    logits = [
        model.forward(batch, runner.cache) for batch, runner in zip(batches, runners, strict=True)
    ]
    assert logits[1].shape == (0, model.config.vocab_size)
    assert torch.equal(runners[1].cache, runners[0].cache)


@pytest.mark.parametrize("wanted", [([4, 20], [], []), ([], [], []), ([24], list(range(7)), [])])
def test_several_ranks(tmp_path: Path, wanted: tuple[list[int], ...]) -> None:
    """Rows of each, told to all: as all tokens going on, also on ranks that want none or have
    none. The last layer's experts see no more than what is wanted."""
    folder = make_tiny_checkpoint(tmp_path)
    chunks = ({0: [5 + i for i in range(5)], 1: [9 + 3 * i for i in range(20)]}, {0: [8] * 7}, {})
    tokens_per_rank, rows_per_rank = (25, 7, 0), tuple(map(len, wanted))
    placement, meeting = Placement.trivial(2, 8, 3, num_redundant=1), Meeting(3)
    rows = [torch.tensor(one, dtype=torch.int64) for one in wanted]

    def run(rank: int) -> list[tuple[torch.Tensor, torch.Tensor, list[int]]]:
        found = []
        for told in (None, rows_per_rank):
            dispatcher = ThreadDispatcher(meeting, rank, placement.slots_per_rank)
            shard = ExpertShard.build(placement, rank, dispatcher, "cpu")
            runner = PagedRunner(load_all(folder, experts=shard))
            batch = runner.batch(chunks[rank], AttentionForm.PLAIN, False, tokens_per_rank)
            batch = replace(batch, logit_rows=rows[rank], rows_per_rank=told)
            logits = runner.model.forward(batch, runner.cache)
            found.append((logits, runner.cache, shard.counts.sum(1).tolist()))
        return found

    def guarded(rank: int) -> list[tuple[torch.Tensor, torch.Tensor, list[int]]]:
        try:
            return run(rank)
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(guarded, range(3)))
    for rank, ((logits, cache, _), (short_logits, short_cache, counts)) in enumerate(ranks):
        assert len(logits) == len(wanted[rank])
        torch.testing.assert_close(short_logits, logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(short_cache, cache)
        assert counts == [EXPERTS * tokens_per_rank[rank], EXPERTS * len(wanted[rank])]
