"""Replies that are lists of parts, one behind the other: thoughts, text, calls of tools."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal, NamedTuple

from gateway.cluster.job import Job
from gateway.output.choice_delta import CallDelta, ChoiceDelta
from gateway.replies.reply_form import ReplyForm


class Piece(NamedTuple):
    """More of a part, or all of it. `call` is only with calls, the first of each with its name."""

    kind: Literal["thoughts", "text", "call"]
    text: str
    call: CallDelta | None = None

    def continues(self, other: "Piece | None") -> bool:
        """Whether it is of the same part as the piece before it."""
        if other is None or self.kind != other.kind:
            return False
        return self.call is None or other.call is None or self.call.index == other.call.index


class PartedReply(ReplyForm):
    """A reply of one choice. Subclasses tell how parts begin, go on and end."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tells_thoughts = job.chat is None or job.chat.tells_thoughts
        self._before: Piece | None = None  # of the part that is open
        self._num_parts = 0  # that have begun
        self._last: ChoiceDelta | None = None  # that has the finish reason

    def events(self, choice: int, delta: ChoiceDelta) -> bytes:
        events = [self._tell(piece) for piece in self._pieces(delta)]
        if delta.finish_reason is not None:
            self._last = delta
            events.append(self._end_part())
        return b"".join(events)

    def _pieces(self, delta: ChoiceDelta) -> Iterator[Piece]:
        if delta.reasoning and self._tells_thoughts:
            yield Piece("thoughts", delta.reasoning)
        num_told = 0
        for call in delta.calls:
            if call.num_before > num_told:
                yield Piece("text", delta.text[num_told : call.num_before])
                num_told = call.num_before
            yield Piece("call", call.arguments, call)
        if len(delta.text) > num_told:
            yield Piece("text", delta.text[num_told:])

    def _tell(self, piece: Piece) -> bytes:
        events = b""
        if not piece.continues(self._before):
            events = self._end_part() + self._begin(piece)
            self._num_parts += 1
        self._before = piece
        return events + (self._more(piece) if piece.text else b"")

    def _end_part(self) -> bytes:
        if self._before is None:
            return b""
        events = self._end(self._before)
        self._before = None
        return events

    @abstractmethod
    def _begin(self, piece: Piece) -> bytes:
        """Events that open a part, before `_more` of the same piece."""

    @abstractmethod
    def _more(self, piece: Piece) -> bytes:
        """Events of a part's next text."""

    @abstractmethod
    def _end(self, piece: Piece) -> bytes:
        """Events that close a part; `piece` was its last."""
