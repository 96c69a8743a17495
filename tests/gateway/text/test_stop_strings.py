"""Stop strings against the obvious way: look at the whole text after every character."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stop_strings import StopStrings

# A small alphabet, so that stop strings overlap themselves and each other.
TEXT = st.text("abc", max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=6), max_size=4)


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the stop string begins that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths)
    return None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


@given(TEXT, STOPS, st.lists(st.integers(0, 40), max_size=6))
def test_same_as_the_obvious_way(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopStrings(stops)
    expected = first_stop(text, stops)
    num_read = 0
    for piece in pieces_of(text, cuts):
        found = matcher.find(piece)
        if found is not None:
            assert num_read + found == expected
            return
        num_read += len(piece)
        # What is held back is exactly what may still become a stop string.
        read = text[:num_read]
        possible = [n for stop in stops for n in range(1, len(stop)) if read.endswith(stop[:n])]
        assert matcher.num_held == max(possible, default=0)
    assert expected is None


def test_begins_in_an_earlier_piece() -> None:
    matcher = StopStrings(["</end>"])
    assert [matcher.find(piece) for piece in ("a </", "en", "d> b")] == [None, None, -4]


def test_the_longest_of_those_that_end_together() -> None:
    assert StopStrings(["c", "abc", "bc"]).find("xabc") == 1


def test_false_start_within_a_start() -> None:
    assert StopStrings(["aab"]).find("aaab") == 1


def test_it_says_which_was_found() -> None:
    stops = StopStrings(["bc", "abc", "zz"])
    assert stops.found is None
    assert stops.find("ab") is None
    assert stops.find("c") == -2
    assert stops.found == "abc"
