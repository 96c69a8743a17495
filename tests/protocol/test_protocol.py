"""The protocol between workers, in every order in which things may happen.

A fault of the product that was found here is kept with its shortest trace, in `test_traces`.
"""

import random
from collections.abc import Callable

import pytest

from decode_worker.inflight_steps import InflightSteps
from decode_worker.quarantine import QuarantineKeeper
from decode_worker.state import RankState
from engine.kv.pages import PagePool
from engine.link.messages import Stopped
from prefill_worker.events import Action, Send
from prefill_worker.service import PrefillService
from prefill_worker.state import PrefillState
from tests.protocol.explorer import ProtocolError, World, explore, shortened, wander
from tests.protocol.failover import Failover
from tests.protocol.pair import Pair
from tests.protocol.world import FAULTS, Bounds

# One page each, two tokens.
SMALL = {"num_prompt_tokens": 1, "max_tokens": 2, "decode_pages": 2, "prefill_pages": 2}


def check(make: Callable[[], World], most_states: int) -> None:
    try:
        explored = explore(make, most_states)
    except ProtocolError as error:
        raise shortened(make, error) from None
    print(explored)  # noqa: T201 - the count is a result
    assert explored.num_ends


@pytest.mark.parametrize("faults", [(), *((kind,) for kind in FAULTS)], ids=str)
def test_a_small_request(faults: tuple[str, ...]) -> None:
    bounds = Bounds(**SMALL, num_faults=len(faults), faults=faults)
    check(lambda: Pair(bounds), most_states=250)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_request_and_a_fault(kind: str) -> None:
    bounds = Bounds(num_faults=1, faults=(kind,))
    check(lambda: Pair(bounds), most_states=12_000)


@pytest.mark.slow
@pytest.mark.parametrize("first", FAULTS)
def test_a_small_request_and_two_faults(first: str) -> None:
    bounds = Bounds(**SMALL, num_faults=2, faults=(first, "leaves", "stops"))
    check(lambda: Pair(bounds), most_states=4_000)


@pytest.mark.slow
def test_two_small_requests() -> None:
    check(lambda: Pair(Bounds(**SMALL, num_requests=2)), most_states=12_000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_small_request_that_may_go_elsewhere(kind: str) -> None:
    bounds = Bounds(**SMALL, num_workers=2, num_faults=1, faults=(kind,))
    check(lambda: Failover(bounds), most_states=2_000)


# ---- worlds that are too large, at random


def some_bounds(dice: random.Random, most_workers: int) -> Bounds:
    num_prompt_tokens, max_tokens = dice.randint(1, 5), dice.randint(1, 6)
    least_pages = (num_prompt_tokens + max_tokens + 1) // 2
    return Bounds(
        num_workers=dice.randint(1, most_workers),
        num_requests=dice.randint(1, 4),
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        decode_pages=least_pages + dice.randint(0, 4),
        prefill_pages=least_pages + dice.randint(0, 3),
        num_faults=dice.randint(0, 8),
        most_each=dice.randint(1, 3),
        same_prompts=dice.random() < 0.5,
        in_line=dice.random() < 0.5,
    )


def walk(kind: type[Pair] | type[Failover], num_walks: int, seed: int | None = None) -> None:
    """Raises ProtocolError with the shortest trace that was found."""
    first = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    num_steps = 0
    for number in range(first, first + num_walks):
        bounds = some_bounds(random.Random(number), 1 if kind is Pair else 2)
        try:
            num_steps += wander(lambda bounds=bounds: kind(bounds), number)
        except ProtocolError as error:
            shorter = shortened(lambda bounds=bounds: kind(bounds), error)
            shorter.add_note(f"seed {number}, {bounds}")
            raise shorter from error
    print(f"{num_walks} walks of {num_steps} steps from seed {first}")  # noqa: T201


@pytest.mark.parametrize("kind", [Pair, Failover])
def test_some_walks(kind: type[Pair] | type[Failover]) -> None:
    walk(kind, num_walks=40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Pair, Failover])
def test_many_walks(kind: type[Pair] | type[Failover]) -> None:
    walk(kind, num_walks=4000)


# ---- it can fail: what is broken by hand is found


def broken_quarantine(patch: pytest.MonkeyPatch) -> None:
    """Pages of a request that is over are used again at once."""
    patch.setattr(PagePool, "quarantine", lambda pool, owner, _attempt: pool.free(owner))


def broken_lease(patch: pytest.MonkeyPatch) -> None:
    """Who cannot be reached is taken for gone."""

    async def until_stopped(_keeper: object, peer: object, attempt_id: str) -> str:
        return "lease over"

    patch.setattr(QuarantineKeeper, "_until_stopped", until_stopped)


def broken_free(patch: pytest.MonkeyPatch) -> None:
    """Pages are freed under a step that writes to them."""
    patch.setattr(
        InflightSteps, "give_up", lambda steps, attempt: steps._pool.free(attempt.attempt_id)
    )


def broken_stop(patch: pytest.MonkeyPatch) -> None:
    """Prefill confirms that it has stopped, while transfers are under way."""
    abort = PrefillState._abort

    def stop(state: PrefillState, attempt_id: str) -> list[Action]:
        return [*abort(state, attempt_id), Send(Stopped(attempt_id=attempt_id, was_known=True))]

    patch.setattr(PrefillState, "_abort", stop)


def broken_epoch(patch: pytest.MonkeyPatch) -> None:
    """A call is taken that was meant for the process before."""
    patch.setattr(PrefillService, "_check_meant", lambda _service, _request: None)


def broken_abort(patch: pytest.MonkeyPatch) -> None:
    """A Prefill that its Abort has overtaken is begun."""
    patch.setattr(PrefillService, "_refuse", lambda _service, _attempt_id: None)


def broken_failure(patch: pytest.MonkeyPatch) -> None:
    """Whose KV does not come waits for ever."""
    patch.setattr(RankState, "_tick", lambda _state, _now: [])


def broken_carrying_on(patch: pytest.MonkeyPatch) -> None:
    """A request that moves begins anew."""
    patch.setattr("gateway.cluster.client.pack_ids", lambda _token_ids: b"")


BROKEN = [
    (Pair, broken_quarantine),
    (Pair, broken_lease),
    (Pair, broken_free),
    (Pair, broken_stop),
    (Pair, broken_epoch),
    pytest.param(Pair, broken_abort, marks=pytest.mark.slow),
    (Pair, broken_failure),
    pytest.param(Failover, broken_carrying_on, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "break_it"), BROKEN, ids=lambda value: value.__name__)
def test_what_is_broken_is_found(
    kind: type[Pair] | type[Failover],
    break_it: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    with pytest.raises(ProtocolError) as found:
        walk(kind, num_walks=2000, seed=0)
    print(found.value)  # noqa: T201
