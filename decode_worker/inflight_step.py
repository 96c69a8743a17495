"""A step of a decode rank that is under way, and the pieces of the next one."""

from collections.abc import Set
from dataclasses import dataclass

from decode_worker.request import Request
from engine.link.messages import TokenOut
from engine.sampling.sampler import SampleRow
from engine.sampling.sequence_end import suppressed_token_ids
from engine.step.pending_step import PendingStep, PendingToken
from engine.step.sequence_chunk import UNKNOWN, SequenceChunk


@dataclass(slots=True, kw_only=True)
class InflightStep:
    """`rows` says which row of the step each request is; `began` in seconds. Tokens of requests
    that are `late` mean nothing: they were sampled without their masks."""

    step: PendingStep
    rows: dict[str, int]
    began: float
    late: Set[str] = frozenset()

    def tokens(self) -> tuple[TokenOut | None, ...]:
        """One a row, None of those that are late; waits."""
        tokens = self.step.result()
        assert all(tokens), "a row without a token"
        return tuple(
            None if name in self.late else token
            for name, token in zip(self.rows, tokens, strict=True)
        )


def next_chunk(
    request: Request, before: InflightStep | None, eos_token_ids: tuple[int, ...]
) -> SequenceChunk:
    """The last token, whose KV is missing yet, and how to sample the one after it. When that
    token is in flight, `before` is the step that samples it."""
    position = request.num_known_soon
    follows = None
    if request.num_in_flight:
        assert before is not None
        follows = PendingToken(before.step, before.rows[request.request_id])
    suppressed = suppressed_token_ids(
        num_tokens=position,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        eos_token_ids=eos_token_ids,
    )
    return SequenceChunk(
        token_ids=UNKNOWN if follows else (request.last_token_id,),
        start=position - 1,
        pages=request.pages,
        sample=SampleRow(
            sampling=request.sampling,
            position=position,
            suppressed=suppressed,
            history=request.history,
        ),
        follows=follows,
    )
