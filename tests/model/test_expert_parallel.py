"""Experts spread over ranks give what one rank with all of them gives, idle ranks included."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ep.dispatch.expert_shard import ExpertShard
from ep.dispatch.local import LocalDispatcher
from ep.placement.placement import EMPTY, Placement
from model.batch import AttentionForm
from model.moe.moe import Moe
from tests.model.driver import PagedRunner, load_all
from tests.model.moe.thread_dispatcher import Meeting, ThreadDispatcher
from tests.tiny_checkpoint import make_tiny_checkpoint

# 8 experts in 2 MoE layers; the last has uneven ranks, one of them without experts in the first
# layer, replicas, holes, and another order in each layer.
_ = EMPTY
PLACEMENTS = (
    Placement.trivial(2, 8, 2),
    Placement.trivial(2, 8, 3, num_redundant=3),
    Placement(
        num_ranks=3,
        slots_per_rank=5,
        num_logical=8,
        physical_to_logical=(
            (2, 6, 5, 4, 0, _, _, _, _, _, 3, 1, 7, _, 2),
            (_, 7, 7, 0, _, 1, 2, 3, 7, 5, _, 4, _, 6, 0),
        ),
    ),
)
# Prompts of each rank; the last rank has none at all.
PROMPTS = ({0: [5, 6, 7, 8, 9]}, {}, {})


@pytest.mark.parametrize(
    ("placement", "step_tokens"), [*((each, 0) for each in PLACEMENTS), (PLACEMENTS[1], 2)]
)
@pytest.mark.parametrize("form", AttentionForm)
def test_same_logits_as_one_rank(
    tmp_path: Path, placement: Placement, step_tokens: int, form: AttentionForm
) -> None:
    """Also in several sub-steps."""
    folder = make_tiny_checkpoint(tmp_path)
    num_ranks = placement.num_ranks
    # The same prompts on every rank with any, so that one run of a whole model is the judge.
    prompts = [PROMPTS[0] if rank != 1 else {} for rank in range(num_ranks)]
    tokens_per_rank = tuple(sum(map(len, mine.values())) for mine in prompts)
    whole = load_all(folder)
    want = PagedRunner(whole).forward(PROMPTS[0], form, all_rows=True)
    meeting = Meeting(num_ranks)

    def run(rank: int) -> torch.Tensor:
        try:
            model = load_all(
                folder,
                experts=ExpertShard.build(
                    placement,
                    rank,
                    ThreadDispatcher(meeting, rank, placement.slots_per_rank),
                    "cpu",
                    step_tokens=step_tokens,
                ),
            )
            runner = PagedRunner(model)
            batch = runner.batch(prompts[rank], form, True, tokens_per_rank)
            return model.forward(batch, runner.cache)
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        results = list(pool.map(run, range(num_ranks)))
    for rank, got in enumerate(results):
        if prompts[rank]:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        else:
            assert got.shape == (0, whole.config.vocab_size)


@pytest.mark.parametrize("form", AttentionForm)
def test_shared_expert_as_one_of_the_routed(tmp_path: Path, form: AttentionForm) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    apart, folded = (
        load_all(folder, experts=shard)
        for shard in (None, replace(ExpertShard.alone(2, 8), fold_shared=True))
    )
    assert [moe.shared is None for moe in (*apart.moe_layers, *folded.moe_layers)] == [
        *(False, False),
        *(True, True),
    ]
    want = PagedRunner(apart).forward(PROMPTS[0], form, all_rows=True)
    got = PagedRunner(folded).forward(PROMPTS[0], form, all_rows=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for moe in folded.moe_layers:
        assert [len(tensor) for tensor in moe.experts.slot_tensors] == [8, 8]


def test_decode_past_the_cap_of_the_dispatcher(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    whole = load_all(folder)
    shard = ExpertShard.alone(2, 8)
    capped = load_all(folder, experts=replace(shard, masked=LocalDispatcher(8, 2)))
    x = torch.randn(5, whole.config.hidden_size, generator=torch.Generator().manual_seed(1))
    is_row = torch.tensor([True, True, False, True, True])
    moe, capped_moe = (model.layers[-1].mlp for model in (whole, capped))
    assert isinstance(moe, Moe)
    assert isinstance(capped_moe, Moe)
    torch.testing.assert_close(
        capped_moe.decode(x, is_row)[is_row], moe.decode(x, is_row)[is_row], rtol=1e-5, atol=1e-6
    )
    assert torch.equal(capped_moe.counts, moe.counts)
    assert moe.counts.sum() == 4 * whole.config.experts_per_token


def test_two_shared_experts_cannot_be_folded_in(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, n_shared_experts=2)
    with pytest.raises(ValueError, match="the model has 2"):
        load_all(folder, experts=replace(ExpertShard.alone(2, 8), fold_shared=True))


def test_nothing_to_do_alone(tmp_path: Path) -> None:
    """T = 0 on the only rank, and the layers are announced all the same."""
    model = load_all(make_tiny_checkpoint(tmp_path))
    runner = PagedRunner(model)
    seen: list[int] = []
    got = model.forward(
        runner.batch({}, AttentionForm.ABSORBED, tokens_per_rank=(0,)), runner.cache, seen.append
    )
    assert got.shape == (0, model.config.vocab_size)
    assert seen == list(range(model.config.num_layers))
    assert not runner.cache.any()


def test_a_token_hardly_depends_on_its_neighbours(tmp_path: Path) -> None:
    """Decoding alone and among others: exactly equal with MKL, while sums are in one piece."""
    model = load_all(make_tiny_checkpoint(tmp_path))
    prompts = {name: list(range(4, 10 + 9 * name)) for name in range(7)}
    together, apart = PagedRunner(model), PagedRunner(model)
    for runner in (together, apart):
        for name, ids in prompts.items():
            runner.forward({name: ids}, AttentionForm.PLAIN)
    chunks = {name: [50 + name] for name in prompts}
    got = together.forward(chunks, AttentionForm.ABSORBED)
    alone = [apart.forward({n: ids}, AttentionForm.ABSORBED) for n, ids in chunks.items()]
    torch.testing.assert_close(got, torch.cat(alone), rtol=0, atol=1e-5)
