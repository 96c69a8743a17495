"""What a decode rank knows of one request.

    phase        pages                      leaves by
    WAITING      none                       admission, abort
    PREFILLING   owned by the attempt,      KV complete and first token in; failure, abort:
                 a peer writes into them    then into quarantine, unless the KV is complete
    RUNNING      owned by the attempt       its end, abort: freed; preemption: freed, WAITING;
                                            not before the steps that it is part of are over

A request that is over is forgotten; only its pages may outlive it, in quarantine under the
attempt id, until the prefill peer is known to have stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from decode_worker.arrival import Arrival
from decode_worker.events import Outcome, RankFacts
from decode_worker.prompt_lookup import PromptLookup
from engine.link.messages import Failed, Finish, Prefilled, TokenOut
from engine.process.draft_count import FIRST_SHARE, OF_REQUEST, share_after
from engine.sampling.history import History, Match
from engine.sampling.sampling_params import Sampling
from engine.sampling.sequence_end import finish_after, most_tokens


class RequestPhase(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One prefill of a request. `attempt_id` owns the pages in the pool, while running too.
    `num_in_flight` steps with the request have begun, and their tokens are not known yet."""

    attempt_id: str
    arrival: Arrival
    num_in_flight: int = 0
    prefilled: Prefilled | None = None
    prefilled_at: float = 0.0  # seconds of the rank's clock
    kv_arrived_at: float = 0.0  # the last of it so far


@dataclass(slots=True, kw_only=True)
class Request:
    """`age` orders requests of equal `priority` by arrival: smaller is older; it outlives
    preemptions. `history` is None when the next token depends on logits and position only;
    `is_ready` unless its grammar is still being compiled.

    `num_tokens` counts the prompt and all output, of which earlier attempts elsewhere have produced
    `earlier_output`; while running, the KV of all but the last is there, or being written by steps
    in flight, as that of tokens that are not known yet.
    """

    request_id: str
    age: int
    num_tokens: int
    num_prompt_tokens: int
    sampling: Sampling
    earlier_output: Sequence[int] = ()
    last_token_id: int
    token_id_before: int = -1  # the last, while running
    is_fresh: bool = False  # it runs, and has not been in a step since its KV came
    drafts: tuple[int, ...] = ()  # of what may follow the last token
    lookup: PromptLookup | None = None  # where drafts are looked up
    draft_share: float = FIRST_SHARE  # of drafts behind right ones, that were right
    priority: int = 0
    history: History | None = None
    is_ready: bool = True
    phase: RequestPhase = RequestPhase.WAITING
    attempt: Attempt | None = None
    pages: list[int] = field(default_factory=list)  # page ids in token order

    def foresee(self, outcome: Outcome, facts: RankFacts) -> Outcome:
        """The outcome that it takes next, with drafts that are looked up, if they are."""
        if self.lookup is None:
            return outcome
        self.lookup.add(token.token_id for token in outcome.tokens)
        return replace(outcome, drafts=self.lookup.drafts(facts.speculative_tokens))

    def take(
        self, outcome: Outcome, facts: RankFacts
    ) -> tuple[tuple[TokenOut, ...], Finish | None]:
        """Takes its tokens until one ends the request, and says how: those after it are as if never
        sampled. None: its grammar does not allow the one after those. Takes its drafts."""
        tokens, finish = self._take(outcome.tokens, facts)
        self.drafts = outcome.drafts
        self.draft_share = share_after(
            self.draft_share, outcome.num_proposed, len(tokens) - 1, OF_REQUEST
        )
        return tokens, finish

    def _take(
        self, tokens: Sequence[TokenOut], facts: RankFacts
    ) -> tuple[tuple[TokenOut, ...], Finish | None]:
        for count, token in enumerate(tokens):
            if self.history is not None and not self.history.append(token.token_id):
                return tuple(tokens[:count]), None
            self.num_tokens += 1
            self.token_id_before, self.last_token_id = self.last_token_id, token.token_id
            finish = finish_after(
                token.token_id,
                num_tokens=self.num_tokens,
                num_prompt_tokens=self.num_prompt_tokens,
                sampling=self.sampling,
                eos_token_ids=facts.eos_token_ids,
                max_model_len=facts.max_model_len,
            )
            if self.history is not None and self.history.is_complete:
                finish = Finish.STOP
            if finish is not Finish.NONE:
                return tuple(tokens[: count + 1]), finish
        return tuple(tokens), Finish.NONE

    def offer(self, outcome: Outcome) -> tuple[Match, ...]:
        """Tells its match, if it has one, of an outcome that it takes next."""
        match = self.match
        if match is None or not outcome.tokens:
            return ()
        match.offer([token.token_id for token in outcome.tokens], outcome.drafts)
        return (match,)

    def failed(self, code: str, text: str) -> Failed:
        attempt_id = self.attempt.attempt_id if self.attempt is not None else ""
        return Failed(request_id=self.request_id, attempt_id=attempt_id, code=code, message=text)

    @property
    def num_in_flight(self) -> int:
        """Tokens after the known ones that are being computed."""
        return self.attempt.num_in_flight if self.attempt is not None else 0

    @property
    def match(self) -> Match | None:
        """Of its grammar, once that is compiled."""
        return self.history.match if self.history is not None else None

    @property
    def awaits_mask(self) -> bool:
        """What may come next is still being worked out."""
        return self.match is not None and not self.match.is_ready

    @property
    def sits_out(self) -> bool:
        """It must not step: its mask is not there, or would not be there in time."""
        match = self.match
        return match is not None and (
            not match.is_ready or (match.is_slow and self.num_in_flight > 0)
        )

    def num_to_come(self, max_model_len: int) -> int:
        """Tokens after those known soon at most."""
        most = most_tokens(
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            max_model_len=max_model_len,
        )
        return most - self.num_known_soon

    @property
    def num_known_soon(self) -> int:
        """Tokens, those in flight included."""
        return self.num_tokens + self.num_in_flight
