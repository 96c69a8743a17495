"""From the tokens of one choice to the pieces of text that a client may see.

A piece never holds half a character (a character's bytes may come from several tokens) nor any
part of a stop string. Joined, the pieces are the same whatever messages the tokens came in.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from gateway.stop_strings import StopStrings
from gateway.tokenizer import Tokenizer
from proto.generate_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason, Token

FinishText = Literal["stop", "length"]


class TokenEntry(msgspec.Struct, frozen=True):
    """One token's log-probabilities. `offset` is where its text begins, in characters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int
    end: int  # offset behind its text


class Piece(msgspec.Struct):
    """What is new: text, and the entries of the tokens whose text is out entirely."""

    text: str
    entries: list[TokenEntry]
    finish_reason: FinishText | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.entries or self.finish_reason)


class OutputText:
    """Incremental detokenizer of one choice; linear in the length of the output."""

    def __init__(
        self, tokenizer: Tokenizer, *, stops: Sequence[str], min_tokens: int, logprobs: bool
    ) -> None:
        self.num_tokens = 0
        self.finish_reason: FinishText | None = None
        self._tokenizer = tokenizer
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens  # stop strings are looked for behind these only
        self._logprobs = logprobs
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded, not handed out yet
        self._num_out = 0  # characters handed out
        self._entries: deque[TokenEntry] = deque()

    def feed(self, tokens: Sequence[Token], finish: "FinishReason.ValueType") -> Piece:
        """Takes the next tokens; those behind the end of a stop string are not counted.

        The token that ended the request (STOP) is counted but neither shown nor listed.
        """
        assert self.finish_reason is None, "nothing comes behind the end"
        num_shown = len(tokens) - (finish == FINISH_REASON_STOP)
        for position, token in enumerate(tokens):
            self.num_tokens += 1
            if position < num_shown and self._push(token):
                return self._take(len(self._held))
        if finish in (FINISH_REASON_STOP, FINISH_REASON_LENGTH):
            self.finish_reason = "stop" if finish == FINISH_REASON_STOP else "length"
            # What is left of a character that was cut off comes out as U+FFFD.
            self._append(self._decoder.decode(b"", final=True))
            return self._take(len(self._held))
        return self._take(len(self._held) - self._stops.num_held)

    def _push(self, token: Token) -> bool:
        """Adds a token's text; true when that completed a stop string."""
        start = self._num_out + len(self._held)
        stopped = self._append(self._decoder.decode(self._tokenizer.shown_bytes(token.token_id)))
        end = self._num_out + len(self._held)
        if self._logprobs:
            top = tuple((other.token_id, other.logprob) for other in token.top_logprobs)
            self._entries.append(TokenEntry(token.token_id, token.logprob, top, start, end))
        if stopped:
            while self._entries and self._entries[-1].offset >= end:
                self._entries.pop()
        return stopped

    def _append(self, text: str) -> bool:
        """Adds text; when it completes a stop string, cuts there and returns true."""
        begin = len(self._held)
        self._held += text
        if self.num_tokens <= self._min_tokens:
            return False
        found = self._stops.find(text)
        if found is None:
            return False
        self._held = self._held[: begin + found]
        self.finish_reason = "stop"
        return True

    def _take(self, num_characters: int) -> Piece:
        text, self._held = self._held[:num_characters], self._held[num_characters:]
        self._num_out += len(text)
        entries = []
        ended = self.finish_reason is not None
        while self._entries and (ended or self._entries[0].end <= self._num_out):
            entries.append(self._entries.popleft())
        return Piece(text, entries, self.finish_reason)
