"""One choice of a chat: thoughts, text and tool calls told apart while the tokens arrive.

`<think>` and `</think>` are looked for as tokens, never as text, and are themselves in neither.
Stop strings count in the answer only, not in the thoughts before it nor in tool calls.
"""

from collections.abc import Collection, Sequence

from gateway.output.choice_delta import ChoiceDelta, FinishText
from gateway.output.output_text import OutputText
from gateway.output.tool_call_parser import ToolCallParser
from gateway.text.think_marks import ThinkMarks
from gateway.text.tokenizer import Tokenizer
from proto.generate_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_UNSPECIFIED,
    FinishReason,
    Token,
)


class ChatOutput:
    """`OutputText` for the thoughts and for the answer, and a parser after the latter."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        marks: ThinkMarks | None,
        is_thinking: bool,
        tools: ToolCallParser | None,
        stops: Sequence[str],
        min_tokens: int,
        logprobs: bool,
        end_token_ids: Collection[int],
        shown: Collection[int | None] = (),
        includes_stop: bool = False,
    ) -> None:
        """`marks` None: the model does not think, or its thoughts are to stay in the text.
        `is_thinking`: the prompt has opened the thoughts."""
        self.finish_reason: FinishText | None = None
        self._tokenizer = tokenizer
        self._marks = marks
        self._tools = tools
        self._stops = stops
        self._min_tokens = min_tokens
        self._logprobs = logprobs
        self._end_token_ids = end_token_ids
        self._num_marks = 0  # and the space before the first
        self._sum_of_marks = 0.0
        marks_of_tools = tools.form.marks if tools is not None else ()
        self._shown = shown or {tokenizer.token_id(mark) for mark in marks_of_tools}
        self._all_shown = shown
        self._includes_stop = includes_stop
        self._leading: list[Token] = []  # space that may come before <think>
        self._thoughts: OutputText | None = None
        self._answer: OutputText | None = None
        if marks is None:
            self._answer = self._part(stops, self._shown)
        elif is_thinking:
            self._thoughts = self._part((), self._all_shown)

    @property
    def num_tokens(self) -> int:
        answer = self._answer.num_tokens if self._answer else 0
        return self._num_marks + len(self._leading) + self.num_reasoning_tokens + answer

    @property
    def num_reasoning_tokens(self) -> int:
        return self._thoughts.num_tokens if self._thoughts else 0

    @property
    def sum_logprob(self) -> float:
        parts = (part.sum_logprob for part in (self._thoughts, self._answer) if part)
        leading = sum(token.logprob for token in self._leading)
        return sum(parts, self._sum_of_marks + leading)

    def feed(self, tokens: Sequence[Token], finish: "FinishReason.ValueType") -> ChoiceDelta:
        """As `OutputText.feed`."""
        delta = ChoiceDelta("", [])
        if self._answer is None:
            tokens = self._feed_thoughts(tokens, finish, delta)
        if self._answer is not None:
            self._feed_answer(tokens, finish, delta)
        return delta

    def _feed_thoughts(
        self, tokens: Sequence[Token], finish: "FinishReason.ValueType", delta: ChoiceDelta
    ) -> Sequence[Token]:
        """Returns the tokens of the answer, if it has begun."""
        assert self._marks is not None
        if self._thoughts is None:
            tokens = self._look_for_open(tokens, finish)
            if self._answer is not None or self._thoughts is None:
                return tokens
        elif tokens and not self.num_tokens and tokens[0].token_id == self._marks.open:
            self._skip(tokens[0])  # opened by the prompt, and again by the model
            tokens = tokens[1:]
        ids = [token.token_id for token in tokens]
        ends = (self._marks.close, self._marks.also_ends_at)
        num_thoughts = next((at for at, one in enumerate(ids) if one in ends), len(ids))
        is_over = num_thoughts < len(ids)
        # The end flushes what is left of a character that was cut off.
        part = self._thoughts.feed(
            tokens[:num_thoughts], FINISH_REASON_LENGTH if is_over else finish
        )
        delta.reasoning, delta.reasoning_entries = part.text, part.entries
        if not is_over:
            self.finish_reason = delta.finish_reason = part.finish_reason
            return ()
        self._answer = self._part(self._stops, self._shown)
        if ids[num_thoughts] == self._marks.also_ends_at:
            return tokens[num_thoughts:]
        self._skip(tokens[num_thoughts])
        return tokens[num_thoughts + 1 :]

    def _look_for_open(
        self, tokens: Sequence[Token], finish: "FinishReason.ValueType"
    ) -> Sequence[Token]:
        """A model that thinks begins with `<think>`, space apart; the tokens after it."""
        assert self._marks is not None
        for position, token in enumerate(tokens):
            if token.token_id == self._marks.open:
                for skipped in (*self._leading, token):
                    self._skip(skipped)
                self._leading.clear()
                self._thoughts = self._part((), self._all_shown)
                return tokens[position + 1 :]
            shown = self._tokenizer.shown_bytes(token.token_id)
            if shown.strip() or not shown:
                break
            self._leading.append(token)
        else:
            if finish == FINISH_REASON_UNSPECIFIED:
                return ()
            position = len(tokens)
        # `position` tokens of this batch are among the leading ones.
        answer = [*self._leading, *tokens[position:]]
        self._leading.clear()  # counted in the answer
        self._answer = self._part(self._stops, self._shown)
        return answer

    def _feed_answer(
        self, tokens: Sequence[Token], finish: "FinishReason.ValueType", delta: ChoiceDelta
    ) -> None:
        assert self._answer is not None
        part = self._answer.feed(tokens, finish)
        delta.text, delta.entries, delta.finish_reason = part.text, part.entries, part.finish_reason
        delta.stop_reason = part.stop_reason
        if self._tools is not None:
            delta.text, delta.calls = self._tools.feed(part.text)
            if part.finish_reason is not None:
                is_cut_off = part.finish_reason == "length"
                text, calls = self._tools.finish(is_cut_off=is_cut_off)
                delta.calls += [call.behind(len(delta.text)) for call in calls]
                delta.text += text
            if part.finish_reason == "stop" and self._tools.num_calls:
                delta.finish_reason = "tool_calls"
        self.finish_reason = delta.finish_reason

    def _skip(self, token: Token) -> None:
        self._num_marks += 1
        self._sum_of_marks += token.logprob

    def _part(self, stops: Sequence[str], shown: Collection[int | None]) -> OutputText:
        return OutputText(
            self._tokenizer,
            stops=stops,
            min_tokens=max(0, self._min_tokens - self.num_tokens),
            logprobs=self._logprobs,
            end_token_ids=self._end_token_ids,
            stops_until=self._tools.form.opening if self._tools is not None else None,
            shown=shown,
            includes_stop=self._includes_stop,
        )
