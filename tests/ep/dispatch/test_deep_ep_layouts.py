"""Models of two sizes at one buffer, where graphs are captured."""

from threading import get_ident

import pytest

from ep.dispatch import deep_ep_buffer
from ep.dispatch.deep_ep_buffer import DeepEpBuffer, Layout
from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.group.group import EpGroup
from tests.ep.fake_deep_ep import fake_deep_ep
from tests.ep.thread_ranks import Meeting, on_all_ranks

NEEDS = DispatchNeeds(
    hidden=2048, itemsize=2, slots_per_rank=3, num_choices=3, step_tokens=64, masked_tokens=8
)
FIRST = Layout(max_tokens=8, hidden=2048, num_experts=6)
SECOND = Layout(max_tokens=4, hidden=2048, num_experts=6)


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_graph_keeps_its_layout(is_captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    capturing: set[int] = set()  # threads, which are ranks
    monkeypatch.setattr(deep_ep_buffer, "_captures", lambda: get_ident() in capturing)

    def program(group: EpGroup, meeting: Meeting) -> int:
        buffer = DeepEpBuffer(fake_deep_ep(meeting), group, [NEEDS])

        def use(layout: Layout) -> None:
            buffer.begin_low_latency(layout)
            buffer.end_low_latency()

        if is_captured:
            capturing.add(get_ident())
        use(FIRST)
        capturing.discard(get_ident())
        use(FIRST)
        use(SECOND)
        return buffer.raw.calls.count("clean")

    if not is_captured:
        assert on_all_ranks(2, program) == [1, 1]
        return
    with pytest.raises(ValueError, match="cannot serve Layout"):
        on_all_ranks(2, program)
