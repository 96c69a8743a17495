"""The prompt told again before a completion, with its log-probabilities if asked for."""

import codecs
from collections.abc import Sequence

from gateway.output.choice_delta import ChoiceDelta, TokenEntry
from gateway.output.output_text import alternatives
from gateway.text.tokenizer import Tokenizer
from proto.generate_pb2 import Token


class PromptEcho:
    """One prompt. A text is told as the client wrote it, token ids as the text they stand for."""

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int], text: str | None) -> None:
        """`text` is what the token ids were made from; None when the client sent ids."""
        self._token_ids = token_ids
        # Where the text after each token begins; the last one is the text's length.
        self._bounds = [0]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        parts = []
        for position, token_id in enumerate(token_ids):
            spelled = tokenizer.spelled_bytes(token_id)
            if text is None:
                spelled = tokenizer.shown_bytes(token_id)
            elif position == 0 and token_id == tokenizer.bos_token_id:
                spelled = spelled if text.encode().startswith(spelled) else b""
            parts.append(decoder.decode(spelled, final=position == len(token_ids) - 1))
            self._bounds.append(self._bounds[-1] + len(parts[-1]))
        self.text = "".join(parts) if text is None else text

    @property
    def num_characters(self) -> int:
        return len(self.text)

    def before(self, delta: ChoiceDelta, logprobs: Sequence[Token]) -> ChoiceDelta:
        """`delta`, the choice's first one, with the prompt before it: its text, and an
        entry for each of `logprobs`."""
        entries = [
            TokenEntry(
                token_id,
                token.logprob if token.has_logprob else None,
                alternatives(token),
                start,
                end,
            )
            for token_id, token, start, end in zip(
                self._token_ids, logprobs, self._bounds, self._bounds[1:], strict=False
            )
        ]
        delta.text, delta.entries = self.text + delta.text, entries + delta.entries
        return delta
