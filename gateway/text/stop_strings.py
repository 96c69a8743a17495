"""Stop strings found in a text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that is complete first, reading character by character; `found` is
    the one that was.

    Where the pieces are cut makes no difference. Each character costs a constant number of
    steps for each stop string (Knuth-Morris-Pratt), however the text repeats itself.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in stops)
        self.found: str | None = None
        # For each stop string: how many of its characters the text read so far ends with.
        self._matched = [0] * len(self._stops)

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def find(self, piece: str) -> int | None:
        """Where the stop string begins that is complete within `piece`, None if none is.

        The position is relative to the piece, negative when it began in an earlier one. Of
        several that end at the same character the longest counts.
        """
        if not self._stops:
            return None
        for position, character in enumerate(piece):
            longest = 0
            for index, stop in enumerate(self._stops):
                matched = self._matched[index]
                while matched and stop[matched] != character:
                    matched = self._borders[index][matched - 1]
                if stop[matched] == character:
                    matched += 1
                if matched == len(stop):
                    if matched > longest:
                        longest, self.found = matched, stop
                    matched = self._borders[index][matched - 1]
                self._matched[index] = matched
            if longest:
                return position + 1 - longest
        return None


def _borders(text: str) -> list[int]:
    """For each prefix of `text` the length of its longest proper prefix that also ends it."""
    borders = [0] * len(text)
    length = 0
    for position in range(1, len(text)):
        while length and text[length] != text[position]:
            length = borders[length - 1]
        if text[length] == text[position]:
            length += 1
        borders[position] = length
    return borders
