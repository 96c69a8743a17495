"""Special tokens that users type, or that a tool returns: they are text, and no tokens.

A chat template makes one text of its own special tokens and of what users wrote. So each special
token within a user's text is put between two marks before, and the text that comes out is cut
there: what is between marks, and all other text but special tokens, is encoded by a tokenizer that has
none.
"""

import re
from collections.abc import Collection

import tokenizers

# No text has them: Unicode keeps them out of interchange.
BEGIN, END = "\U0010fffe", "\U0010ffff"

_MARKS = {ord(BEGIN): None, ord(END): None}


def is_marked(text: str) -> bool:
    return BEGIN in text or END in text


def without_marks(text: str) -> str:
    return text.translate(_MARKS) if is_marked(text) else text


class TypedTokens:
    """Of one tokenizer. Added tokens count whether they are called special or not: those that open
    a user's turn in DeepSeek-V3 are not."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = {
            token.content: (token_id, token)
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if not token.content.isspace()
        }
        self._ids = {content.strip(): token_id for content, (token_id, _) in added.items()}
        # Where one begins with another, the longer one counts.
        longest_first = sorted(added, key=len, reverse=True)
        written = "|".join(map(re.escape, longest_first)) or "(?!)"
        taken = "|".join(
            r"\s*" * added[content][1].lstrip
            + re.escape(content)
            + r"\s*" * added[content][1].rstrip
            for content in longest_first
        )
        self._written = re.compile(written)
        self._parts = re.compile(f"{BEGIN}(?:{written}){END}|({taken or '(?!)'})")
        self._without_added = tokenizers.Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._without_added.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._without_added.pre_tokenizer = tokenizer.pre_tokenizer

    def mark(self, text: str, *, but: Collection[str] = ()) -> str:
        """`text` with each special token in it marked, except those of `but`."""
        return self._written.sub(
            lambda found: found[0] if found[0] in but else f"{BEGIN}{found[0]}{END}",
            without_marks(text),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text in which users' tokens are marked."""
        texts, controls = [""], []
        end = 0
        for found in self._parts.finditer(text):
            if found[1] is None:
                continue
            texts[-1] = without_marks(text[end : found.start()])
            texts.append("")
            controls.append(self._ids[found[1].strip()])
            end = found.end()
        texts[-1] = without_marks(text[end:])
        encodings = self._without_added.encode_batch_fast(texts, add_special_tokens=False)
        token_ids: list[int] = encodings[0].ids
        for control, encoding in zip(controls, encodings[1:], strict=True):
            token_ids += [control, *encoding.ids]
        return token_ids
