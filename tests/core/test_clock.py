import pytest

from core.clock import Clock, ManualClock, SystemClock


@pytest.mark.parametrize("clock", [ManualClock(), SystemClock()])
def test_clocks_never_go_back(clock: Clock) -> None:
    assert clock.now() <= clock.now()


def test_a_manual_clock_is_turned_by_hand() -> None:
    clock = ManualClock(5.0)
    clock.advance(2.5)
    assert clock.now() == 7.5
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)
