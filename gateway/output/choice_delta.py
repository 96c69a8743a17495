"""What is new of a choice: text, reasoning, parts of tool calls, log-probabilities."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from proto.generate_pb2 import Token

FinishText = Literal["stop", "length", "tool_calls"]


class TokenEntry(msgspec.Struct, frozen=True):
    """One token's log-probabilities. `offset` is where its text begins, in characters;
    `logprob` is None for the first token of an echoed prompt."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int
    end: int  # offset after its text


class CallDelta(msgspec.Struct, frozen=True):
    """More of tool call number `index`; its first delta has id and name. So many characters of the
    piece's text are before it."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None
    num_before: int = 0

    def behind(self, num_characters: int) -> "CallDelta":
        """With so much more text before it."""
        return msgspec.structs.replace(self, num_before=self.num_before + num_characters)


class ChoiceDelta(msgspec.Struct):
    """What is new: text, and the entries of the tokens whose text is out entirely. `token_ids`,
    where they are told, are those that came, out or not."""

    text: str
    entries: list[TokenEntry]
    finish_reason: FinishText | None = None
    reasoning: str = ""
    reasoning_entries: list[TokenEntry] = []
    calls: list[CallDelta] = []
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    token_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[Token] = ()  # of the first piece, where they are told

    def __bool__(self) -> bool:
        return bool(
            self.text
            or self.entries
            or self.finish_reason
            or self.reasoning
            or self.reasoning_entries
            or self.calls
            or self.token_ids
        )


def join_deltas(pieces: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """All of a choice as one piece, its tool calls whole."""
    return ChoiceDelta(
        "".join(piece.text for piece in pieces),
        [entry for piece in pieces for entry in piece.entries],
        pieces[-1].finish_reason if pieces else None,
        "".join(piece.reasoning for piece in pieces),
        [entry for piece in pieces for entry in piece.reasoning_entries],
        _join_calls(pieces),
        pieces[-1].stop_reason if pieces else None,
        [token_id for piece in pieces for token_id in piece.token_ids],
        pieces[0].prompt_logprobs if pieces else (),
    )


def _join_calls(pieces: Iterable[ChoiceDelta]) -> list[CallDelta]:
    first: dict[int, CallDelta] = {}
    arguments: dict[int, list[str]] = {}
    num_before = 0
    for piece in pieces:
        for delta in piece.calls:
            first.setdefault(delta.index, delta.behind(num_before))
            arguments.setdefault(delta.index, []).append(delta.arguments)
        num_before += len(piece.text)
    return [
        msgspec.structs.replace(delta, arguments="".join(arguments[index]))
        for index, delta in sorted(first.items())
    ]
