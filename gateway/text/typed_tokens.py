"""Special tokens that users type, or that a tool returns: they are text, and no tokens.

A chat template makes one text of its own special tokens and of what users wrote. So each special
token within a user's text is put between two marks before, and the text that comes out is cut at
the others: all between them is encoded by a tokenizer that has no special tokens.
"""

import re
from collections.abc import Collection

import tokenizers

# No text has them: Unicode keeps them out of interchange.
BEGIN, END = "\U0010fffe", "\U0010ffff"

NOTHING = "(?!)"  # a pattern that is found nowhere

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
        ordered = [added[content][1] for content in sorted(added, key=len, reverse=True)]
        self._written = re.compile("|".join(re.escape(one.content) for one in ordered) or NOTHING)
        # Some take in the spaces beside them.
        taken = "|".join(
            r"\s*" * one.lstrip + re.escape(one.content) + r"\s*" * one.rstrip for one in ordered
        )
        self._parts = re.compile(f"{BEGIN}(?:{self._written.pattern}){END}|({taken or NOTHING})")
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
        controls = [found for found in self._parts.finditer(text) if found[1] is not None]
        begins = [0, *(found.end() for found in controls)]
        ends = [*(found.start() for found in controls), len(text)]
        texts = [without_marks(text[begin:end]) for begin, end in zip(begins, ends, strict=True)]
        encodings = self._without_added.encode_batch_fast(texts, add_special_tokens=False)
        token_ids: list[int] = encodings[0].ids
        for control, encoding in zip(controls, encodings[1:], strict=True):
            token_ids += [self._ids[control[1].strip()], *encoding.ids]
        return token_ids
