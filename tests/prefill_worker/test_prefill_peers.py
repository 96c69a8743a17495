"""Decode workers that die or take their time: a prefill rank gives up no more than theirs."""

from collections.abc import Callable

import pytest

from engine.link.messages import Abort, Failed, Prefilled, Stopped
from prefill_worker.state import RELEASE_STALL_SECONDS, TRANSFER_STALL_SECONDS
from tests.prefill_worker.one_rank import (
    PAGE,
    Model,
    OneRank,
    TargetRank,
    check_arrived,
    prefilled,
    submit_to,
    tokens,
)


@pytest.mark.parametrize("dies", ["before", "in the middle", "after the answer"])
def test_a_peer_that_dies_fails_its_attempts_and_no_others(model: Model, dies: str) -> None:
    rank, dead, alive = OneRank(model, chunk_tokens=2 * PAGE), TargetRank(model), TargetRank(model)
    lost = submit_to(dead, "lost", tokens(4 * PAGE))
    kept = submit_to(alive, "kept", tokens(5 * PAGE, seed=1))
    if dies == "before":
        dead.transfer.kill()
    elif dies == "in the middle":
        rank.link.on_drain = lambda: rank.loop._num_steps == 1 and dead.transfer.kill()  # type: ignore[assignment]
    else:
        rank.transfer.held = True
    kill_and_land = [dead.transfer.kill, lambda: (rank.transfer.deliver(), None)[1]]
    messages = rank.run(rank.tell(lost, kept), *kill_and_land)
    (failure,) = [m for m in messages if isinstance(m, Failed)]
    assert (failure.attempt_id, failure.code) == ("lost", "UNAVAILABLE")
    prefilled(messages, "kept")
    check_arrived(model, alive, kept)
    assert rank.link.stats.kv_failures_total == 1
    rank.check_nothing_held()


def waits(rank: OneRank, seconds: float) -> list[Callable[[], None]]:
    """Script lines in which the rank looks after its transfers for so long, and a little more."""
    return [lambda: rank.clock.advance(0.25)] * (int(seconds / 0.25) + 3)


def test_a_transfer_that_never_lands_is_given_up(model: Model) -> None:
    rank, target = OneRank(model), TargetRank(model)
    rank.transfer.drop_next(1)
    messages = rank.run(submit_to(target, "a", tokens(20)), *waits(rank, TRANSFER_STALL_SECONDS))
    assert [type(m) for m in messages] == [Prefilled, Failed]
    rank.check_nothing_held()


def test_a_known_prefix_goes_over_a_slow_network(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times as long as a peer may take none. As by TCP, transfers under way end together."""
    rank, target, slow = OneRank(model), TargetRank(model), TargetRank(model)
    rank.run(submit_to(target, "a", tokens(70)))
    page_bytes = PAGE * model.config.kv_dim * 4
    total_bytes = 8 * model.config.num_kv_layers * page_bytes
    bytes_per_second = total_bytes / (3 * TRANSFER_STALL_SECONDS)
    for name in ("prefill_worker.push.MOST_PUSH_BYTES", "transfer.paced.LEAST_ROOM_BYTES"):
        monkeypatch.setattr(name, 2 * page_bytes)
    num_carried = 0.0

    def carry() -> None:
        nonlocal num_carried
        rank.clock.advance(0.25)
        num_carried += bytes_per_second / 4
        num_under_way = sum(
            num_bytes for parcel in rank.transfer._parcels for *_, num_bytes in parcel.ranges
        )
        if num_carried >= num_under_way:
            rank.transfer.deliver()
            num_carried = 0.0

    rank.transfer.held = True
    submit = submit_to(slow, "b", tokens(70))
    messages = rank.run(submit, *[carry] * 100)
    assert prefilled(messages, "b").num_cached_tokens == 64
    check_arrived(model, slow, submit)
    rank.check_nothing_held()


def with_a_slow_peer(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> tuple[OneRank, TargetRank, Callable[[], None]]:
    """A rank that knows the prefix of tokens(70), a peer to which two pages at a time travel,
    and what lands them, a second later."""
    rank, other, slow = OneRank(model), TargetRank(model), TargetRank(model)
    rank.run(submit_to(other, "a", tokens(70)))
    page_bytes = PAGE * model.config.kv_dim * 4
    for name in ("prefill_worker.push.MOST_PUSH_BYTES", "transfer.paced.LEAST_ROOM_BYTES"):
        monkeypatch.setattr(name, 2 * page_bytes)

    def land() -> None:
        rank.clock.advance(1.0)
        rank.transfer.deliver()

    rank.transfer.held = True
    return rank, slow, land


def test_a_short_prompt_does_not_wait_for_a_long_one_of_the_same_peer(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, slow, land = with_a_slow_peer(model, monkeypatch)
    long = submit_to(slow, "long", tokens(70))
    short = submit_to(slow, "short", tokens(5, seed=1))
    rank.run(long, short, *[land] * 60)
    for submit in (long, short):
        check_arrived(model, slow, submit)
    order = [notice.attempt_id for notice in slow.notices]
    assert order.count("long") > 10
    assert order.index("short") < 5
    rank.check_nothing_held()


def test_an_abort_waits_for_what_is_under_way_and_for_nothing_in_line(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, slow, land = with_a_slow_peer(model, monkeypatch)
    before = rank.link.stats.kv_bytes_total
    long, kept = submit_to(slow, "long", tokens(70)), submit_to(slow, "kept", tokens(5, seed=1))
    abort = Abort(attempt_id="long")
    messages = rank.run(rank.tell(long, kept), lambda: None, abort, *[land] * 6)
    (stopped,) = [message for message in messages if isinstance(message, Stopped)]
    assert stopped == Stopped(attempt_id="long", was_known=True)
    assert not [message for message in messages if isinstance(message, Failed)]
    check_arrived(model, slow, kept)
    assert [notice.attempt_id for notice in slow.notices].count("long") <= 2
    arrived = sum(notice.num_layer_pages for notice in slow.notices)
    page_bytes = PAGE * model.config.kv_dim * 4
    assert rank.link.stats.kv_bytes_total - before == arrived * page_bytes
    rank.check_nothing_held()


def test_a_rank_that_cannot_stop_its_writes_dies(model: Model) -> None:
    rank, target = OneRank(model), TargetRank(model)
    rank.transfer.drop_next(1)
    rank.transfer.release = lambda peer_name: None  # type: ignore[method-assign]
    seconds = TRANSFER_STALL_SECONDS + RELEASE_STALL_SECONDS
    with pytest.raises(RuntimeError, match="do not end"):
        rank.run(submit_to(target, "a", tokens(20)), *waits(rank, seconds))
