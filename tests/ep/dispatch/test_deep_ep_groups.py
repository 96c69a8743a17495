"""Groups of one to 32 nodes: which of DeepEP's modes serve them, and with what memory.

The numbers of nodes are those for which the kernels of `sgl-deep-ep` 0.1.2.post1 are instantiated,
as the symbols of its library have them.
"""

from dataclasses import replace

import pytest
import torch

from ep.dispatch.buffer_plan import QUEUE_ROWS, deep_ep_terms, nvlink_bytes, rdma_bytes
from ep.dispatch.deep_ep_buffer import DeepEpBuffer, Sizes
from ep.dispatch.deep_ep_limits import refusal
from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.dispatch.dispatcher_choice import RankFacts, choose
from ep.dispatch.token_caps import decode_cap
from ep.group.group import EpGroup
from ep.placement.placement import Placement
from tests.ep.fake_deep_ep import fake_deep_ep
from tests.ep.fake_deep_ep_sizes import COMBINE, DISPATCH, low_latency_size
from tests.ep.thread_ranks import Meeting, on_all_ranks

EXPERTS, REDUNDANT, HIDDEN = 256, 32, 7168
NODES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 16, 18, 20, 24, 32)
COMPILED = {1, 2, 3, 4, 6, 8, 12, 16, 18, 20}
LIBRARY = fake_deep_ep(Meeting(1))


def prefill(num_ranks: int) -> DispatchNeeds:
    placement = Placement.trivial(1, EXPERTS, num_ranks, REDUNDANT)
    return DispatchNeeds(
        hidden=HIDDEN,
        itemsize=2,
        slots_per_rank=placement.slots_per_rank,
        num_choices=8,
        step_tokens=4096,
    )


def decode(num_ranks: int) -> DispatchNeeds:
    tokens = decode_cap(256, num_ranks)
    return replace(prefill(num_ranks), step_tokens=256, masked_tokens=tokens, masked_only=True)


def machines(num_ranks: int) -> list[RankFacts]:
    return [
        RankFacts(
            installed=True, hopper=True, host=rank // 8, device=rank % 8, peers=255, rdma=True
        )
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_nodes", NODES)
def test_a_decode_group_is_any_number_of_whole_nodes(num_nodes: int) -> None:
    num_ranks = 8 * num_nodes
    needs = decode(num_ranks)
    assert choose("auto", needs, machines(num_ranks)).name == "deep_ep"
    sizes = Sizes.of(LIBRARY, num_ranks, [needs])
    experts = num_ranks * needs.slots_per_rank
    assert sizes.nvlink_bytes == 0
    assert sizes.rdma_bytes == low_latency_size(needs.masked_tokens, HIDDEN, num_ranks, experts)
    assert sizes.num_qps == needs.slots_per_rank
    names = {term.name for term in deep_ep_terms(needs, num_ranks)}
    assert not {name for name in names if "queues" in name or "by expert" in name}
    assert "dispatch: masked rows of long steps" not in names
    longer = deep_ep_terms(replace(needs, step_tokens=257), num_ranks)
    assert sum(each.num_bytes for each in longer if "masked rows" in each.name) == 4 * (
        experts * needs.masked_tokens * HIDDEN * 2
    )


@pytest.mark.parametrize("num_nodes", NODES)
def test_a_prefill_group_is_as_many_nodes_as_kernels_are_compiled_for(num_nodes: int) -> None:
    num_ranks = 8 * num_nodes
    needs = prefill(num_ranks)
    choice = choose("auto", needs, machines(num_ranks))
    assert choice.name == ("deep_ep" if num_nodes in COMPILED else "collective")
    if num_nodes not in COMPILED:
        assert f"not for {num_nodes} ({num_ranks} ranks)" in choice.reason
        with pytest.raises(ValueError, match="which prefill needs, is compiled for 1, 2, 3, 4, 6,"):
            choose("deep_ep", needs, machines(num_ranks))
        return
    sizes = Sizes.of(LIBRARY, num_ranks, [needs])
    assert sizes.nvlink_bytes == nvlink_bytes(HIDDEN, num_ranks)
    assert sizes.rdma_bytes == rdma_bytes(HIDDEN, num_ranks)


def test_queues_are_known_for_whatever_the_library_has_them_for() -> None:
    assert set(QUEUE_ROWS) == set(DISPATCH) == set(COMBINE)


@pytest.mark.parametrize("num_ranks", [1, 3, 6, 12, 20, 68, 76])
def test_parts_of_nodes_are_refused_in_both_modes(num_ranks: int) -> None:
    for needs in (prefill(num_ranks), decode(num_ranks)):
        reason = refusal(needs, num_ranks)
        assert reason == f"it serves groups of 2, 4 or whole nodes of 8 ranks, not of {num_ranks}"


@pytest.mark.parametrize(
    ("num_ranks", "changes", "reason"),
    [
        # Counted by a thread an expert, which the low-latency mode has no need of.
        (2, {"slots_per_rank": 129}, "129 experts a rank are more than 128"),
        (16, {"slots_per_rank": 65}, "65 experts a rank are more than 64"),
        # One heap for both, which the normal mode addresses by an int32.
        (32, {"masked_tokens": 256, "slots_per_rank": 9}, "one reaches 2 GiB"),
    ],
)
def test_limits_of_the_normal_mode(num_ranks: int, changes: dict[str, int], reason: str) -> None:
    needs = replace(prefill(num_ranks), **changes)
    assert reason in refusal(needs, num_ranks)
    assert not refusal(replace(needs, masked_tokens=64, masked_only=True), num_ranks)


def test_limits_of_the_low_latency_mode() -> None:
    many = replace(decode(72), slots_per_rank=26)
    assert refusal(many, 72) == "1872 experts a layer are more than 1848"
    long = replace(decode(72), masked_tokens=4096)
    assert refusal(long, 72) == "4096 tokens a rank are more than its low-latency buffers hold"


@pytest.mark.parametrize(
    ("num_ranks", "redundant"),
    [(8, 0), (40, 24), (48, 32), (72, 32), (96, 32), (128, 0), (144, 32)],
)
def test_so_many_redundant_experts_fill_all_slots(num_ranks: int, redundant: int) -> None:
    """An uneven number leaves slots empty, which costs their memory; how many would be full is
    what the start says."""
    alone = Placement.trivial(2, EXPERTS, num_ranks)
    assert alone.num_physical - EXPERTS == redundant
    assert alone.num_empty == redundant
    full = Placement.trivial(2, EXPERTS, num_ranks, redundant)
    assert full.num_empty == 0
    assert full.slots_per_rank == alone.slots_per_rank


def test_a_decode_group_is_made_without_the_normal_mode() -> None:
    """Of an installed library that knows no queues for it."""
    needs = DispatchNeeds(
        hidden=2048, itemsize=2, slots_per_rank=3, num_choices=3, step_tokens=8, masked_tokens=8
    )

    def program(group: EpGroup, meeting: Meeting) -> int:
        library = fake_deep_ep(meeting)

        def unknown(num_ranks: int) -> None:
            raise AssertionError(f"Unsupported number of EP ranks: {num_ranks}")

        library.Buffer.get_dispatch_config = unknown
        with pytest.raises(RuntimeError, match="no normal mode here: Unsupported number.*: 2"):
            DeepEpBuffer(library, group, [needs])
        buffer = DeepEpBuffer(library, group, [replace(needs, masked_only=True)])
        nvlink_size: int = buffer.raw.num_nvl_bytes
        buffer.close()
        return nvlink_size

    assert on_all_ranks(2, program) == [0, 0]


def test_slots_are_a_size_of_the_layer() -> None:
    """Low-latency kernels want as many slots on each rank: 256 experts and 32 copies on 72."""
    placement = Placement.trivial(1, EXPERTS, 72, REDUNDANT)
    assert placement.slots_per_rank == 4
    counts = torch.bincount(torch.tensor(placement.physical_to_logical[0]), minlength=EXPERTS)
    assert counts.tolist() == [2] * REDUNDANT + [1] * (EXPERTS - REDUNDANT)
