"""What the tokens after prompts, and the prompts' own log-probabilities, need beside the KV.

open -> (grammar compiled) -> row, scores of each chunk -> close
"""

from dataclasses import dataclass

from core.clock import Clock
from core.errors import EpserveError
from core.token_ids import unpack_ids
from engine.grammar.grammars import Grammars
from engine.link.messages import SubmitPrefill, TokenOut
from engine.sampling.history import History, history_of
from engine.sampling.prompt_scores import PromptScores
from engine.sampling.sampler import SampleRow
from engine.sampling.sampling_params import Sampling, sampling_of
from engine.sampling.sequence_end import suppressed_token_ids
from engine.start.rank import RankContext
from prefill_worker.plan import Chunk


@dataclass(slots=True)
class _FirstToken:
    sampling: Sampling
    num_prompt_tokens: int
    history: History | None
    scores: PromptScores | None
    is_ready: bool


class FirstTokens:
    """By attempt id. An attempt without the need for anything costs nothing but its entry."""

    def __init__(self, context: RankContext, clock: Clock) -> None:
        self._eos_token_ids = context.config.eos_token_ids
        self._grammars = Grammars(
            context.settings.model, context.config.vocab_size, self._eos_token_ids, clock
        )
        self._open: dict[str, _FirstToken] = {}

    @property
    def num_waiting(self) -> int:
        """Attempts whose grammar is still being compiled."""
        return self._grammars.num_waiting

    def open(self, submit: SubmitPrefill) -> None:
        """An attempt that is open already stays as it is."""
        if submit.attempt_id in self._open:
            return
        sampling = sampling_of(submit.sampling)
        token_ids, num_prompt_tokens = unpack_ids(submit.token_ids), submit.num_prompt_tokens
        prompt, output = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
        scores = None
        if sampling.prompt_logprobs and not output:  # who has output tokens has had them already
            scores = PromptScores(prompt.tolist(), sampling.top_prompt_logprobs)
        self._open[submit.attempt_id] = _FirstToken(
            sampling=sampling,
            num_prompt_tokens=num_prompt_tokens,
            history=history_of(sampling, prompt, output),
            scores=scores,
            is_ready=sampling.grammar is None,
        )
        if sampling.grammar is not None:
            self._grammars.begin(submit.attempt_id, sampling, output)

    def poll(self) -> list[tuple[str, EpserveError]]:
        """Attempts that can have no first token, and why."""
        failures: list[tuple[str, EpserveError]] = []
        for attempt_id, result in self._grammars.poll():
            if isinstance(result, EpserveError):
                failures.append((attempt_id, result))
                continue
            first = self._open[attempt_id]
            assert first.history is not None
            first.history.attach(result)
            first.is_ready = True
        return failures

    def is_ready(self, attempt_id: str) -> bool:
        """Whether the attempt can be computed up to its end."""
        return self._open[attempt_id].is_ready

    def row(self, chunk: Chunk) -> SampleRow | None:
        """How to sample after a chunk, if anything is."""
        first = self._open[chunk.attempt_id]
        if not chunk.is_last or not first.sampling.max_tokens:
            return None
        suppressed = suppressed_token_ids(
            num_tokens=chunk.end,
            num_prompt_tokens=first.num_prompt_tokens,
            sampling=first.sampling,
            eos_token_ids=self._eos_token_ids,
        )
        return SampleRow(
            sampling=first.sampling,
            position=chunk.end,
            suppressed=suppressed,
            history=first.history,
        )

    def scores(self, attempt_id: str) -> PromptScores | None:
        return self._open[attempt_id].scores

    def prompt_logprobs(self, attempt_id: str) -> tuple[TokenOut, ...]:
        """Of the whole prompt, once it is computed; empty where not asked for."""
        scores = self._open[attempt_id].scores
        return () if scores is None else tuple(scores.tokens)

    def close(self, attempt_id: str) -> None:
        """Unknown attempts are not an error."""
        self._open.pop(attempt_id, None)
        self._grammars.drop(attempt_id)

    def stop(self) -> None:
        """No more grammars are compiled."""
        self._grammars.close()
