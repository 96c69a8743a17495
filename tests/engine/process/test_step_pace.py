"""Which steps are taken for slow."""

import random

import pytest

from engine.process.step_pace import NUM_LEARNT, NUM_RECENT, NUM_REMEMBERED, StepPace


def seconds_of(num_tokens: int, rng: random.Random) -> float:
    return 0.01 * num_tokens * rng.uniform(0.8, 1.5)


@pytest.mark.parametrize("seed", range(3))
def test_steps_are_compared_with_those_of_their_size(seed: int) -> None:
    rng = random.Random(seed)
    pace = StepPace()
    for size in (1, 64, 1, 64):
        for _ in range(NUM_LEARNT):
            pace.note([seconds_of(size, rng)], [size])
            assert not pace.is_slow, "small steps, then large ones"
    slow = [7 * seconds_of(64, rng) for _ in range(NUM_RECENT)]
    pace.note(slow[: NUM_RECENT // 4], [64] * (NUM_RECENT // 4))
    assert not pace.is_slow, "now and then one is late"
    pace.note(slow, [64] * NUM_RECENT)
    assert pace.is_slow
    assert 4 < pace.factor < 14
    pace.note([0.64] * NUM_RECENT, [64] * NUM_RECENT)
    assert not pace.is_slow


def test_the_first_steps_and_what_lasts_are_usual() -> None:
    pace = StepPace()
    pace.note([5.0, 0.01, 0.01], [1, 1, 1])
    assert pace.factor == 1
    pace.note([0.01] * 2 * NUM_LEARNT, [1] * 2 * NUM_LEARNT)
    pace.note([0.1] * 10 * NUM_REMEMBERED, [1] * 10 * NUM_REMEMBERED)
    assert not pace.is_slow
