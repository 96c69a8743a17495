"""Which dispatchers a group of ranks comes to, and how it ends with them."""

from dataclasses import replace

import pytest
import torch

from ep.dispatch.collective import CollectiveDispatcher
from ep.dispatch.deep_ep import DeepEpDispatcher
from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.dispatch.dispatcher_choice import Choice, Wanted
from ep.dispatch.dispatchers import agree, dispatch_terms, make_dispatchers, with_deep_ep
from ep.dispatch.local import LocalDispatcher
from ep.group.group import EpGroup
from tests.ep.fake_deep_ep import fake_deep_ep
from tests.ep.thread_ranks import Meeting, on_all_ranks

CPU = torch.device("cpu")
NEEDS = DispatchNeeds(
    hidden=2048, itemsize=2, slots_per_rank=4, num_choices=3, step_tokens=64, masked_tokens=64
)
DEEP_EP = Choice(name="deep_ep", reason="all ranks reach each other directly")


def test_without_gpus_there_are_collectives() -> None:
    def program(group: EpGroup, _: Meeting) -> str:
        choice = agree(group, "auto", NEEDS, CPU)
        made = make_dispatchers(group, choice, NEEDS, CPU)
        assert isinstance(made.dispatcher, CollectiveDispatcher)
        assert isinstance(made.masked, CollectiveDispatcher)
        assert made.aligned is None
        made.close()
        return choice.reason

    assert on_all_ranks(3, program) == ["no DeepEP: it is not installed"] * 3


@pytest.mark.parametrize(
    ("wanted", "size", "reason"),
    [("deep_ep", 2, "cannot be had: it is not installed"), ("local", 2, "the group has 2")],
)
def test_what_cannot_be_had_is_refused_on_all_ranks(wanted: Wanted, size: int, reason: str) -> None:
    def program(group: EpGroup, _: Meeting) -> None:
        with pytest.raises(ValueError, match=reason):
            agree(group, wanted, NEEDS, CPU)

    on_all_ranks(size, program)


def test_one_rank_is_local() -> None:
    def program(group: EpGroup, _: Meeting) -> None:
        made = make_dispatchers(group, agree(group, "auto", NEEDS, CPU), NEEDS, CPU)
        assert isinstance(made.dispatcher, LocalDispatcher)

    on_all_ranks(1, program)


def test_deep_ep_serves_all_forms_and_ends_with_the_group() -> None:
    def program(group: EpGroup, meeting: Meeting) -> None:
        made = with_deep_ep(fake_deep_ep(meeting), group, DEEP_EP, NEEDS)
        assert made is not None
        assert isinstance(made.dispatcher, DeepEpDispatcher)
        assert made.dispatcher is made.aligned is made.masked
        made.close()
        assert made.buffer is not None
        assert made.buffer.raw.calls == ["destroy"]

    on_all_ranks(2, program)


def test_deep_ep_that_only_decodes_has_one_form() -> None:
    needs = replace(NEEDS, masked_only=True, part_tokens=32)

    def program(group: EpGroup, meeting: Meeting) -> None:
        made = with_deep_ep(fake_deep_ep(meeting), group, DEEP_EP, needs)
        assert made is not None
        assert made.dispatcher is made.aligned is None
        assert isinstance(made.masked, DeepEpDispatcher)
        assert made.step_tokens == 32
        made.close()

    on_all_ranks(2, program)


@pytest.mark.parametrize("is_wish", [False, True])
def test_deep_ep_that_does_not_begin(is_wish: bool) -> None:
    """As one that was built without NVSHMEM: it fails before it talks to its peers."""

    def program(group: EpGroup, meeting: Meeting) -> None:
        library = fake_deep_ep(meeting)

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("NVSHMEM is disabled during compilation")

        library.Buffer.__init__ = fail
        choice = Choice(name="deep_ep", reason="", is_wish=is_wish)
        if is_wish:
            with pytest.raises(ValueError, match="cannot be had: NVSHMEM is disabled"):
                with_deep_ep(library, group, choice, NEEDS)
        else:
            assert with_deep_ep(library, group, choice, NEEDS) is None

    on_all_ranks(2, program)


def test_terms_say_what_tensors_take() -> None:
    """Rows of the masked form, counted from what a dispatch really makes."""

    def program(group: EpGroup, meeting: Meeting) -> None:
        made = with_deep_ep(fake_deep_ep(meeting), group, DEEP_EP, NEEDS)
        assert made is not None
        assert made.buffer is not None
        terms = {t.name: t.num_bytes for t in dispatch_terms("deep_ep", NEEDS, group.size)}
        raw = made.buffer.raw
        assert terms["dispatch: NVLink queues"] == raw.num_nvl_bytes
        low_latency = sum(size for name, size in terms.items() if "low-latency" in name)
        assert 0 <= raw.num_rdma_bytes - low_latency <= 128
        rounding = terms["dispatch: NVSHMEM heap rounding"]
        assert (low_latency + rounding) % 2**29 == 0
        rows = group.size * NEEDS.masked_tokens * NEEDS.slots_per_rank * NEEDS.hidden * 2
        assert terms["dispatch: masked rows"] == 2 * rows

    on_all_ranks(2, program)
    for name in ("collective", "local"):
        assert all(term.num_bytes > 0 for term in dispatch_terms(name, NEEDS, 2))
