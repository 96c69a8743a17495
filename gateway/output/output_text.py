"""From the tokens of one choice to the pieces of text that a client may see.

A piece never holds half a character (a character's bytes may come from several tokens) nor any
part of a stop string. Joined, the pieces are the same whatever messages the tokens came in.
"""

import codecs
from collections import deque
from collections.abc import Collection, Sequence

from gateway.output.choice_delta import ChoiceDelta, FinishText, TokenEntry
from gateway.text.stop_strings import StopStrings
from gateway.text.tokenizer import Tokenizer
from proto.generate_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason, Token


class OutputText:
    """Incremental detokenizer of one choice; linear in the length of the output."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str],
        min_tokens: int,
        logprobs: bool,
        end_token_ids: Collection[int] | None = None,
        offset: int = 0,
        stops_until: str | None = None,
        shown: Collection[int | None] = (),
        includes_stop: bool = False,
    ) -> None:
        """`end_token_ids` are those that end a request and are not shown (None: whichever
        token is the last); `offset` is where the text begins, for log-probabilities;
        after `stops_until` no stop string counts; special tokens are left out but for `shown`;
        `includes_stop`: the text has the stop string, or token, that ended it."""
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.sum_logprob = 0.0
        self.finish_reason: FinishText | None = None
        self.stop_string: str | None = None
        self._tokenizer = tokenizer
        self._shown = shown
        self._includes_stop = includes_stop
        self._stops = StopStrings(stops)
        self._stops_until = stops_until or ""
        self._end_of_stops = StopStrings([stops_until] if stops and stops_until else ())
        self._min_tokens = min_tokens  # stop strings are looked for after these only
        self._logprobs = logprobs
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded, not handed out yet
        self._num_out = offset  # characters handed out
        self._end_token_ids = end_token_ids
        self._entries: deque[TokenEntry] = deque()

    def feed(self, tokens: Sequence[Token], finish: "FinishReason.ValueType") -> ChoiceDelta:
        """Takes the next tokens; those after the end of a stop string are not counted.

        The token that ended the request (STOP) is counted but neither shown nor listed, unless
        it is to be; a grammar that is complete ends one without such a token.
        """
        assert self.finish_reason is None, "nothing comes after the end"
        hides_last = finish == FINISH_REASON_STOP and not self._includes_stop
        num_shown = len(tokens) - (hides_last and self._ends_with_mark(tokens))
        for position, token in enumerate(tokens):
            self.num_tokens += 1
            self.sum_logprob += token.logprob
            if position < num_shown and self._push(token):
                return self._take(len(self._held))
        if finish in (FINISH_REASON_STOP, FINISH_REASON_LENGTH):
            self.finish_reason = "stop" if finish == FINISH_REASON_STOP else "length"
            # What is left of a character that was cut off comes out as U+FFFD.
            self._append(self._decoder.decode(b"", final=True))
            return self._take(len(self._held))
        return self._take(len(self._held) - self._stops.num_held)

    def _ends_with_mark(self, tokens: Sequence[Token]) -> bool:
        if not tokens or self._end_token_ids is None:
            return bool(tokens)
        return tokens[-1].token_id in self._end_token_ids

    def _push(self, token: Token) -> bool:
        """Adds a token's text; true when that completed a stop string."""
        start = self._num_out + len(self._held)
        is_shown = token.token_id in self._shown
        bytes_of = self._tokenizer.spelled_bytes if is_shown else self._tokenizer.shown_bytes
        stopped = self._append(self._decoder.decode(bytes_of(token.token_id)))
        end = self._num_out + len(self._held)
        if self._logprobs:
            self._entries.append(
                TokenEntry(token.token_id, token.logprob, alternatives(token), start, end)
            )
        if stopped:
            while self._entries and self._entries[-1].offset >= end:
                self._entries.pop()
        return stopped

    def _append(self, text: str) -> bool:
        """Adds text; when it completes a stop string, cuts there and returns true."""
        begin = len(self._held)
        self._held += text
        found = self._find_stop(text)
        if found is None:
            return False
        if self._includes_stop and self.stop_string is not None:
            found += len(self.stop_string)
        self._held = self._held[: begin + found]
        self.finish_reason = "stop"
        return True

    def _find_stop(self, text: str) -> int | None:
        """As `StopStrings.find`, for the text that comes next."""
        stops, over = self._stops, self._end_of_stops.find(text)
        if over is not None:
            text = text[: over + len(self._stops_until)]
            self._stops = StopStrings(())
        found = stops.find(text) if self.num_tokens > self._min_tokens else None
        self.stop_string = stops.found
        return found

    def _take(self, num_characters: int) -> ChoiceDelta:
        text, self._held = self._held[:num_characters], self._held[num_characters:]
        self._num_out += len(text)
        entries = []
        ended = self.finish_reason is not None
        while self._entries and (ended or self._entries[0].end <= self._num_out):
            entries.append(self._entries.popleft())
        return ChoiceDelta(text, entries, self.finish_reason, stop_reason=self.stop_string)


def alternatives(token: Token) -> tuple[tuple[int, float], ...]:
    return tuple((other.token_id, other.logprob) for other in token.top_logprobs)
