"""A step of a decode rank that is under way, and the pieces of the next one."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from decode_worker.events import Outcome, RankFacts
from decode_worker.request import Request
from engine.link.messages import TokenOut
from engine.sampling.history import History
from engine.sampling.sampler import SampleRow
from engine.sampling.sequence_end import suppressed_token_ids
from engine.step.pending_step import PendingStep, PendingToken
from engine.step.sequence_chunk import UNKNOWN, SequenceChunk


@dataclass(slots=True, kw_only=True)
class InflightStep:
    """`rows` says which row of the step each request is, `chunks` what is computed of them, in
    order, `num_tokens` those of the rank with most; `began` in seconds. Tokens of requests that are
    `late` mean nothing: they were sampled without their masks."""

    step: PendingStep
    rows: dict[str, int]
    chunks: Sequence[SequenceChunk]
    num_tokens: int
    began: float
    late: Set[str] = frozenset()

    def outcomes(self) -> tuple[Outcome, ...]:
        """One a row; waits."""
        tokens = iter(self.step.result())
        sampled = [[_known(next(tokens)) for _ in chunk.samples] for chunk in self.chunks]
        drafts = self.step.drafts() or [[] for _ in sampled]
        return tuple(
            Outcome() if name in self.late else outcome_of(chunk.drafts, its_tokens, its_drafts)
            for name, chunk, its_tokens, its_drafts in zip(
                self.rows, self.chunks, sampled, drafts, strict=True
            )
        )


def _known(token: TokenOut | None) -> TokenOut:
    assert token is not None, "a row without a token"
    return token


def outcome_of(proposed: Sequence[int], sampled: list[TokenOut], drafts: Sequence[int]) -> Outcome:
    """NOTE: the rule of speculation. A draft is accepted if it is the token that (seed, position)
    draws in its place, and all drafts before it were: so tokens are those of single steps."""
    num_accepted = 0
    for draft, token in zip(proposed, sampled, strict=False):
        if token.token_id != draft:
            break
        num_accepted += 1
    return Outcome(tuple(sampled[: num_accepted + 1]), len(proposed), tuple(drafts))


def next_chunk(
    request: Request, before: InflightStep | None, facts: RankFacts, num_drafts: int
) -> SequenceChunk:
    """The last token, whose KV is missing yet, with up to `num_drafts` after it, and how to sample
    what follows each of them. When that token is in flight, `before` is the step that samples it.

    Where an MTP layer drafts, a fresh request begins with the token before its last: of that the
    state is wanted, from which the drafts' KV is made that prefill could not know.
    """
    num_tokens = request.num_known_soon
    follows = None
    if request.num_in_flight:
        assert before is not None
        follows = PendingToken(before.step, before.rows[request.request_id])
    drafts = request.drafts[: min(num_drafts, _most_drafts(request, facts))]
    known = (UNKNOWN if follows else (request.last_token_id,)) + drafts
    start = num_tokens - 1
    if request.is_fresh and num_drafts and not facts.looks_up:
        known, start = (request.token_id_before, *known), start - 1
    history, rows = request.history, []
    for index in range(1 + len(drafts)):
        if index and history is not None:
            history = history.ahead(drafts[index - 1])
        rows.append(_sample_row(request, num_tokens + index, history, facts))
    return SequenceChunk(
        token_ids=known,
        start=start,
        pages=request.pages,
        sample=rows[-1],
        checks=tuple(rows[:-1]),
        follows=follows,
    )


def _most_drafts(request: Request, facts: RankFacts) -> int:
    """There must be pages for them, and room for a token after them; with a grammar, a mask after
    each of them."""
    room = len(request.pages) * facts.page_tokens - request.num_known_soon
    most = max(0, min(room, request.num_to_come(facts.max_model_len) - 1))
    return most if request.match is None else min(most, len(request.match.masks) - 1)


def _sample_row(
    request: Request, position: int, history: History | None, facts: RankFacts
) -> SampleRow:
    suppressed = suppressed_token_ids(
        num_tokens=position,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        eos_token_ids=facts.eos_token_ids,
    )
    return SampleRow(
        sampling=request.sampling,
        position=position,
        suppressed=suppressed,
        history=history,
    )
