"""Token ids of a text from those of its words, each of which is encoded once.

To encode costs the library two microseconds a word, most of them for where each token stands in
the text; to find a word that was seen before costs a fifth of one. Texts repeat their words.

A text may be cut between a printable ASCII character and a space, and the ids of its parts make
those of the whole, where

    - the pre-tokenizer always cuts there, and looks at nothing beyond a space: true of the ways
      to split that are named below;
    - no added token contains a space, takes in spaces beside it or asks what it stands beside;
    - nothing normalises the text.
"""

import json
import re
from itertools import chain
from typing import Any, cast

import tokenizers

# One character, and what is behind it up to the next such place.
_WORD = re.compile(r"(?s:.)[^ ]*(?:(?<![!-~]) +[^ ]*)*")

# Each character is part of a piece, and in no piece there is a space behind something else.
_CUTTING = frozenset(
    {
        # DeepSeek-V3.
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
        # The demo model.
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+"""
        r"""|\s+(?!\S)|\s+""",
    }
)
# Pieces without spaces, which others of these split before: digits; Chinese and Japanese.
_BESIDE = frozenset({r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"})

MAX_WORDS = 50_000  # 20 MB or so
# Longer ones are hardly ever seen again.
MAX_WORD_CHARACTERS = 48
# A new word costs as much as four of a text that is encoded as a whole.
FEW_WORDS = 16
NEW_ONE_IN = 8


class WordIds:
    """Of one tokenizer, for which `can_be_cut` is true."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int] | None:
        """As the library does, without special tokens at the ends. None for a text with many new
        words, which the library encodes faster; some of them are known from then on."""
        words = _WORD.findall(text)
        found = list(map(self._known.get, words))
        if None in found:
            new = list({word: None for word, ids in zip(words, found, strict=True) if ids is None})
            max_new = max(FEW_WORDS, len(words) // NEW_ONE_IN)
            if len(new) > max_new:
                self._learn([word for word in new if len(word) <= MAX_WORD_CHARACTERS][:max_new])
                return None
            learned = self._learn(new)
            found = [
                learned[word] if ids is None else ids
                for word, ids in zip(words, found, strict=True)
            ]
        return list(chain.from_iterable(cast("list[tuple[int, ...]]", found)))

    def _learn(self, words: list[str]) -> dict[str, tuple[int, ...]]:
        encodings = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)
        learned = {
            word: tuple(encoding.ids) for word, encoding in zip(words, encodings, strict=True)
        }
        if len(self._known) + len(learned) > MAX_WORDS:
            self._known.clear()  # what is common is back at once
        for word, ids in learned.items():
            if len(word) <= MAX_WORD_CHARACTERS:
                self._known[word] = ids
        return learned


def can_be_cut(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether texts may be encoded word by word."""
    model = tokenizer.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout:
        return False
    if _stages(tokenizer.normalizer, "normalizers"):
        return False
    if any(
        " " in added.content or added.lstrip or added.rstrip or added.single_word
        for added in tokenizer.get_added_tokens_decoder().values()
    ):
        return False
    stages = _stages(tokenizer.pre_tokenizer, "pretokenizers")
    return any(map(_cuts, stages)) and all(_cuts(stage) or _is_harmless(stage) for stage in stages)


def _cuts(stage: dict[str, Any]) -> bool:
    match stage:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
            # In some files the line breaks stand as they are.
            return pattern.replace("\r", r"\r").replace("\n", r"\n") in _CUTTING
    return False


def _is_harmless(stage: dict[str, Any]) -> bool:
    match stage:
        case {"type": "Digits"} | {"type": "ByteLevel", "add_prefix_space": False}:
            return True
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
            return pattern in _BESIDE
    return False


def _stages(whole: Any, name: str) -> list[dict[str, Any]]:  # noqa: ANN401 - has no types
    """What a normalizer or pre-tokenizer, perhaps a sequence of them, does."""
    if whole is None:
        return []
    fields: dict[str, Any] = json.loads(whole.__getstate__())
    return fields[name] if fields["type"] == "Sequence" else [fields]
