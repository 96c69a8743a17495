"""A MoE layer in its three forms: tokens in fixed sizes, aligned on the device, and contiguous."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ep.dispatch.collective import CollectiveDispatcher
from ep.dispatch.dispatcher import Payload
from ep.dispatch.expert_shard import ExpertShard, make_dispatcher
from ep.dispatch.local import LocalDispatcher
from ep.group.group import EpGroup
from ep.placement.expert_slots import ExpertSlots
from ep.placement.placement import EMPTY, Placement
from kernels.build import paths
from model.moe.fp8_experts import Fp8Experts
from tests.ep.thread_ranks import Meeting, on_all_ranks
from tests.kernels.triton_device import INTERPRETED
from tests.model.decode_rows import norm_error
from tests.model.moe.moe_layer import FORMATS, HIDDEN, load_moe, make_folders, padded

EXPERTS, CAP = 16, 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_folders(tmp_path_factory.mktemp("moe"))


def alone(*, fold_shared: bool = False) -> ExpertShard:
    """All experts, in an order of their own, some twice, one slot empty."""
    experts = (*reversed(range(EXPERTS)), 3, EMPTY, 3, 0)
    placement = Placement(
        num_ranks=1, slots_per_rank=20, num_logical=EXPERTS, physical_to_logical=(experts,)
    )
    return ExpertShard.build(
        placement, 0, LocalDispatcher(20), "cpu", fold_shared,
        aligned=LocalDispatcher(20), masked=LocalDispatcher(20, CAP),
    )  # fmt: skip


def tokens(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def assert_same(got: torch.Tensor, want: torch.Tensor, kind: str) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if kind == "fp8":  # summed in an order that depends on the number of rows
        assert not len(want) or norm_error(got, want) < 1e-3
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("kind", "fold_shared"), [(kind, False) for kind in FORMATS] + [("plain", True), ("fp8", True)]
)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, CAP])
def test_all_forms_are_the_same(
    folders: dict[str, Path], kind: str, fold_shared: bool, num_tokens: int
) -> None:
    moe = load_moe(folders[kind], shard=alone(fold_shared=fold_shared))
    assert (moe.experts.payload is Payload.PLAIN) == (kind == "plain")
    x = tokens(num_tokens)
    want = replace(moe, aligned=None).forward(x, (num_tokens,))
    counted = moe.counts.clone()
    assert int(counted.sum()) == num_tokens * 4
    assert_same(moe.forward(x, (num_tokens,)), want, kind)
    assert torch.equal(moe.counts, 2 * counted)
    assert_same(moe.decode(*padded(x, CAP))[:num_tokens], want, kind)
    assert torch.equal(moe.counts, 3 * counted)  # padding is not counted


@pytest.mark.parametrize("fold_shared", [False, True])
@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_fused(folders: dict[str, Path], kind: str, fold_shared: bool) -> None:
    """In sums of another order."""
    shard = replace(alone(fold_shared=fold_shared), fused=True)
    fused, moe = (load_moe(folders[kind], shard=each) for each in (shard, alone()))
    for num_tokens in (0, 1, 7):
        x = tokens(num_tokens)
        want = moe.forward(x, (num_tokens,))
        for got in (fused.forward(x, (num_tokens,)), fused.decode(*padded(x, CAP))[:num_tokens]):
            assert got.shape == want.shape
            assert not num_tokens or norm_error(got, want) < (1e-2 if kind == "fp8" else 1e-6)
    assert torch.equal(fused.counts, 2 * moe.counts)


def test_what_cannot_be_fused_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="no fused experts in int4"):
        load_moe(folders["int4"], shard=replace(alone(), fused=True))
    placement = Placement.trivial(1, EXPERTS, 2)
    with pytest.raises(ValueError, match="not 2"):
        ExpertShard.build(placement, 0, LocalDispatcher(8), "cpu", fused=True)


@pytest.mark.parametrize("kind", FORMATS)
def test_without_tokens(folders: dict[str, Path], kind: str) -> None:
    moe = load_moe(folders[kind], shard=alone())
    for each in (moe, replace(moe, aligned=None)):
        assert each.forward(tokens(0), (0,)).shape == (0, HIDDEN)
    only_padding = padded(tokens(0), 3)
    assert torch.equal(moe.decode(*only_padding), moe.shared.forward(only_padding[0]))
    assert not moe.counts.any()


ON_THREE = Placement(
    num_ranks=3,
    slots_per_rank=7,
    num_logical=EXPERTS,
    physical_to_logical=(
        (15, 2, 3, EMPTY, 0, 5, 9, 6, 7, 8, 4, 1, 3, 3, 10, 11, EMPTY, 13, 14, 12, 0),
    ),
)


@pytest.mark.parametrize("kind", FORMATS)
def test_ranks_are_the_same_as_one(folders: dict[str, Path], kind: str) -> None:
    one, num_tokens = load_moe(folders[kind], shard=alone()), (CAP, 0, 5)

    def on_rank(group: EpGroup, meeting: Meeting) -> None:
        shard = ExpertShard.build(
            ON_THREE, group.rank, make_dispatcher(group, 7), "cpu",
            aligned=CollectiveDispatcher(group, 7),
            masked=CollectiveDispatcher(group, 7, CAP),
        )  # fmt: skip
        moe = load_moe(folders[kind], shard=shard)
        own = num_tokens[group.rank]
        x = tokens(own, seed=group.rank)
        assert_same(moe.decode(*padded(x, CAP))[:own], wanted[group.rank], kind)
        assert_same(moe.forward(x, num_tokens), wanted[group.rank], kind)

    given = [tokens(own, seed=rank) for rank, own in enumerate(num_tokens)]
    wanted = [one.forward(x, (len(x),)) if len(x) else x for x in given]
    on_all_ranks(3, on_rank)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("num_tokens", [(3 * CAP + 1, 0, 5), (0, 0, 0)])
def test_where_all_is_masked_longer_steps_go_in_parts(
    folders: dict[str, Path], kind: str, num_tokens: tuple[int, ...]
) -> None:
    """As in decode groups that are made without anything else. Padding is not counted."""
    one = load_moe(folders[kind], shard=alone())
    given = [tokens(own, seed=rank) for rank, own in enumerate(num_tokens)]
    wanted = [one.forward(x, (len(x),)) if len(x) else x for x in given]

    def on_rank(group: EpGroup, meeting: Meeting) -> int:
        masked = CollectiveDispatcher(group, 7, CAP)
        shard = ExpertShard.build(ON_THREE, group.rank, None, "cpu", masked=masked)
        moe = load_moe(folders[kind], shard=shard)
        assert not moe.shares_rows
        got, want = moe.forward(given[group.rank], num_tokens), wanted[group.rank]
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        # In parts, experts have other numbers of rows, which some CPUs sum in another order.
        assert not len(want) or norm_error(got, want) < (1e-3 if kind == "fp8" else 1e-6)
        return int(moe.counts.sum())

    assert on_all_ranks(3, on_rank) == [4 * own for own in num_tokens]


@pytest.mark.parametrize("kind", FORMATS)
def test_what_arrives_is_computed_in_parts(folders: dict[str, Path], kind: str) -> None:
    one, num_tokens = load_moe(folders[kind], shard=alone()), (CAP, 0, 5)
    given = [tokens(own, seed=rank) for rank, own in enumerate(num_tokens)]
    wanted = [one.forward(x, (len(x),)) if len(x) else x for x in given]

    def on_rank(group: EpGroup, meeting: Meeting) -> None:
        aligned = CollectiveDispatcher(group, 7, row_cap=5)
        shard = ExpertShard.build(ON_THREE, group.rank, aligned, "cpu", aligned=aligned)
        moe = load_moe(folders[kind], shard=shard)
        assert_same(moe.forward(given[group.rank], num_tokens), wanted[group.rank], kind)

    on_all_ranks(3, on_rank)


def test_fp8_experts_are_what_the_checkpoint_says(folders: dict[str, Path]) -> None:
    kept = load_moe(folders["fp8"], shard=alone())
    plain = load_moe(folders["fp8"], shard=alone(), linear="plain")
    assert isinstance(kept.experts, Fp8Experts)
    assert not isinstance(plain.experts, Fp8Experts)
    x = tokens(CAP)
    # What is left between them is FP8 activations in front of each product.
    assert 1e-3 < norm_error(kept.decode(*padded(x, CAP)), plain.decode(*padded(x, CAP))) < 0.05


def test_fp8_experts_move_whole(folders: dict[str, Path]) -> None:
    """As migration moves them: bytes of a slot over those of another."""
    moe = load_moe(folders["fp8"], shard=alone())
    x = tokens(5)
    want = moe.decode(*padded(x, CAP))[:5]
    slots = ExpertSlots(moe.experts.slot_tensors)
    assert slots.num_slots == 20
    row = torch.empty(slots.slot_bytes, dtype=torch.uint8)
    # Expert 15 (slot 0) into the empty slot, and gone from where it was.
    slots.read(0, row)
    slots.write(17, row)
    slots.write(0, torch.zeros_like(row))
    moe.maps.physical[15] = 17
    assert_same(moe.decode(*padded(x, CAP))[:5], want, "fp8")


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="the GPU runs these kernels in test_cuda_moe.py")
@pytest.mark.parametrize("kind", ["plain", "fp8"])
@pytest.mark.filterwarnings("ignore:overflow|invalid value|All-NaN:RuntimeWarning")
def test_through_every_triton_kernel(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU without other libraries runs, in Triton's interpreter."""
    moe, x = load_moe(folders[kind], shard=alone()), tokens(5)
    if kind == "plain":  # as it is laid out on a GPU
        experts = moe.experts
        experts = replace(
            experts, gate_up=experts.gate_up.contiguous(), down=experts.down.contiguous()
        )
        moe = replace(moe, experts=experts)
    want = moe.decode(*padded(x, 8))[:5]
    chosen: set[str] = set()

    def triton(operation: str, device_type: str, index: int) -> str:
        del device_type, index
        chosen.add(operation)
        return "triton"

    monkeypatch.setattr(paths, "_best_path", triton)
    moe.counts.zero_()
    got = moe.decode(*padded(x, 8))[:5]
    product = {"plain": "grouped_linear", "fp8": "fp8_grouped_gemm"}[kind]
    assert {"gate", "permute", product, "silu_mul", "combine"} <= chosen
    assert norm_error(got, want) < (0.08 if kind == "fp8" else 1e-4)
    assert norm_error(moe.forward(x, (5,)), want) < (0.08 if kind == "fp8" else 1e-4)
    assert int(moe.counts.sum()) == 2 * 5 * 4
