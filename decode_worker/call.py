"""One Generate call as the front sees it, from acceptance to the rank's last word."""

import asyncio
from collections import deque

from core.errors import EpserveError
from core.log import REQUEST_ID
from core.token_ids import num_ids, pack_ids
from decode_worker.call_spans import CallSpans
from engine.link.messages import Produced
from engine.server.request_records import LegRecord
from engine.server.wire import token_message
from proto import generate_pb2


class Call:
    """`key` is the request's name on this worker: unique, also when a request comes again
    while its last call is still being cleared away.

    The prompt stays here, for as many prefills as it takes; the rank need not have it.

    `left` is set when no one listens any more. The record outlives that until the rank has
    said its last word, since pages and a prefill attempt hang on it.
    """

    def __init__(
        self,
        *,
        key: str,
        request: generate_pb2.GenerateRequest,
        rank: int,
        deadline: float | None,
        accepted_at: float,
    ) -> None:
        self.key = key
        self.request = request
        self.request_id = request.request_id
        # The id that every leg's log lines have: the client's, where it came along.
        self.traced_id = REQUEST_ID.get() or request.request_id
        self.rank = rank
        self.num_prompt_tokens = num_ids(request.prompt_token_ids)
        self.prefill = request.prefill
        self.deadline = deadline  # of the loop's clock
        self.accepted_at = accepted_at
        self.reserved_at: float | None = None
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[generate_pb2.Token] = []  # until they are sent
        self.num_sent_tokens = 0
        self.record = LegRecord(
            leg_id=request.request_id,
            traced_id=self.traced_id,
            rank=rank,
            num_prompt_tokens=self.num_prompt_tokens,
            num_earlier_tokens=num_ids(request.output_token_ids),
            peer=request.prefill,
        )
        self.spans = CallSpans()
        self.last_sent_at: float | None = None
        self.left = False
        # The latest prefill attempt, and why it failed, as its worker put it.
        self.attempt_id = ""
        self.prefill_error: EpserveError | None = None
        self._output = bytearray(request.output_token_ids)  # so far
        self._items: deque[Produced | EpserveError] = deque()
        self._something = asyncio.Event()

    @property
    def token_ids(self) -> bytes:
        """Prompt and output so far, as the rank has it."""
        return self.request.prompt_token_ids + self._output

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + num_ids(self._output)

    def put(self, item: Produced | EpserveError) -> None:
        """New tokens, or the end by an error."""
        if isinstance(item, Produced):
            self._output += pack_ids(token.token_id for token in item.tokens)
        self._items.append(item)
        self._something.set()

    async def take(self) -> list[Produced | EpserveError]:
        """Everything since the last call, at least one item."""
        await self._something.wait()
        self._something.clear()
        items = list(self._items)
        self._items.clear()
        return items


def response_of(
    call: Call, items: list[Produced | EpserveError]
) -> tuple[generate_pb2.GenerateResponse, EpserveError | None]:
    """All new tokens as one response, and the error after them, if any."""
    response = generate_pb2.GenerateResponse()
    if not call.num_sent_tokens:
        response.num_cached_tokens = call.num_cached_tokens
        response.rank = call.rank
        response.prompt_logprobs.extend(call.prompt_logprobs)
        call.prompt_logprobs = []
    for item in items:
        if isinstance(item, EpserveError):
            return response, item
        response.tokens.extend(token_message(token) for token in item.tokens)
        response.num_accepted_drafts += item.num_accepted
        response.num_rejected_drafts += item.num_proposed - item.num_accepted
        response.finish_reason = generate_pb2.FinishReason.ValueType(item.finish)
    return response, None
