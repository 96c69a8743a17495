"""What every endpoint that generates does with the pieces of its choices: one form a subclass."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from core.errors import EpserveError
from gateway.cluster.run import Usage
from gateway.output.choice_delta import ChoiceDelta

SSE_DONE = b"data: [DONE]\n\n"  # OpenAI's

encode_json = msgspec.json.encode


def sse_event(content: bytes) -> bytes:
    """`content` must be without line breaks, as JSON is."""
    return b"data: " + content + b"\n\n"


class ReplyForm(ABC):
    """Renders one request's reply: whole, or as server-sent events."""

    ping: ClassVar[bytes] = b": ping\n\n"  # while there is nothing to say

    def note_usage(self, usage: Usage) -> None:
        """Before the events of pieces, where each is to tell the usage so far."""
        raise AssertionError("no field of this API asks for it")

    def opening(self, choice: int, usage: Usage) -> bytes:
        """Events before a choice's first piece; `usage` as far as it is known."""
        return b""

    @abstractmethod
    def events(self, choice: int, delta: ChoiceDelta) -> bytes:
        """Events of a piece, including that of its finish reason."""

    @abstractmethod
    def ending(self, usage: Usage) -> bytes:
        """The last events of a stream that ends well."""

    @abstractmethod
    def failure(self, error: EpserveError) -> bytes:
        """The last event of a stream that does not."""

    @abstractmethod
    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        """The JSON object of a reply that is not streamed; one piece a choice."""
