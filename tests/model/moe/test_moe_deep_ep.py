"""A MoE layer over DeepEP's twin, however its experts are stored: what one rank makes of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ep.dispatch import deep_ep_limits
from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.dispatch.dispatcher_choice import Choice
from ep.dispatch.dispatchers import with_deep_ep
from ep.dispatch.expert_shard import ExpertShard
from ep.group.group import EpGroup
from ep.placement.placement import Placement
from kernels.elementwise.combine import combined
from kernels.elementwise.quantise import quantise
from model.moe.moe import NormedRows
from tests.ep import fake_deep_ep_low_latency
from tests.ep.fake_deep_ep import fake_deep_ep
from tests.ep.thread_ranks import Meeting, on_all_ranks
from tests.model.moe import moe_layer
from tests.model.moe.moe_layer import FORMATS, load_moe, make_folders, padded

HIDDEN, EXPERTS, RANKS, ROWS, TOKENS = 512, 16, 2, 64, (5, 9)
NEEDS = DispatchNeeds(
    hidden=HIDDEN,
    itemsize=2,
    slots_per_rank=EXPERTS // RANKS,
    num_choices=8,
    step_tokens=ROWS,
    masked_tokens=ROWS,
)
# Relative, by norm: partial sums in bfloat16, and scales of FP8 that are rounded otherwise.
BOUND = 0.02
# The same of decode steps with static scales: what arrives is rounded to FP8 for the second time.
BOUND_OF_TWO_ROUNDINGS = 0.1


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(moe_layer.SIZES, "hidden_size", HIDDEN)
        return make_folders(tmp_path_factory.mktemp("deep_ep"))


@pytest.fixture
def _small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are compiled for larger ones."""
    monkeypatch.setattr(deep_ep_limits, "LOW_LATENCY_HIDDEN", (HIDDEN,))
    monkeypatch.setattr(fake_deep_ep_low_latency, "KNOWN_HIDDEN", (HIDDEN,))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.usefixtures("_small_rows")
@pytest.mark.parametrize("kind", FORMATS)
def test_one_layer_on_two_ranks(folders: dict[str, Path], kind: str) -> None:
    alone = load_moe(folders[kind], dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(n, HIDDEN, generator=generator).bfloat16() for n in TOKENS]
    wanted = [alone.forward(x, (len(x),)) for x in rows]
    placement = Placement.trivial(1, EXPERTS, RANKS)

    def on_rank(group: EpGroup, meeting: Meeting) -> tuple[float, float, float]:
        made = with_deep_ep(fake_deep_ep(meeting), group, Choice(name="deep_ep", reason=""), NEEDS)
        assert made is not None
        shard = ExpertShard.build(
            placement, group.rank, made.dispatcher, "cpu", aligned=made.aligned, masked=made.masked
        )
        moe = load_moe(folders[kind], shard=shard, dtype=torch.bfloat16)
        x, want = rows[group.rank], wanted[group.rank]
        forward = moe.forward(x, TOKENS)
        assert moe.shares_rows == (kind == "fp8")
        if moe.shares_rows:
            small = NormedRows(quantise(x), quantise(x))
            assert torch.equal(combined(moe.forward_parts(x, TOKENS, None, small)), forward)
        contiguous = replace(moe, aligned=None).forward(x, TOKENS)
        got = moe.decode(*padded(x, ROWS))[: len(x)]
        masked_only = replace(moe, dispatcher=None, aligned=None).forward(x, TOKENS)
        assert error(masked_only, got) < BOUND
        made.close()
        return error(forward, want), error(contiguous, want), error(got, want)

    errors = on_all_ranks(RANKS, on_rank)
    decode_bound = BOUND_OF_TWO_ROUNDINGS if kind == "static int4" else BOUND
    for forward, contiguous, decode in errors:
        assert 0 <= forward < BOUND
        assert 0 <= contiguous < BOUND
        assert 0 <= decode < decode_bound
