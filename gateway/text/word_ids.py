"""Token ids of a text from those of its words, each of which is encoded once.

To encode costs the library two microseconds a word, most of them for where each token stands in
the text; to find a word that was seen before costs a fifth of one. Texts repeat their words.

A text may be cut between a printable ASCII character and a space, and between an ASCII letter and
whatever else ASCII has, and the ids of its parts make those of the whole, where

    - the pre-tokenizer always cuts there, and looks at nothing beyond: true of the ways to split
      that are named below;
    - no added token contains such a place (or there is no cut before the character that is
      after the letter), takes in spaces beside it or asks what it stands beside;
    - nothing normalises the text.
"""

import json
import re
from collections.abc import Iterable
from itertools import chain, pairwise
from typing import Any, cast

import tokenizers

# In no piece is there a space after something else, nor another character after a letter, but
# for letters and marks that are not ASCII.
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
# Before one of those: digits; Chinese and Japanese.
_BESIDE = frozenset({r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"})

# How a byte-level vocabulary spells a space.
SPACE = "\u0120"

MAX_WORDS = 100_000  # 30 MB or so
# Longer ones are hardly ever seen again.
MAX_CHARACTERS = 48
# A new word that is not plain costs as much as three of a text that is encoded as a whole.
NEW_ONE_IN = 4
# So many are always worth it: as part of a text, or for the texts to come.
FEW_WORDS = 32
# What takes as long as a short request: an event loop waits for no more.
MANY_WORDS = 400
MANY_CHARACTERS = 2000  # in words that are not plain; text without spaces is one


class WordIds:
    """Of one tokenizer, for which `can_be_cut` is true."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._model = tokenizer.model
        added = tokenizer.get_added_tokens_decoder().values()
        self._word = _word_pattern([one.content for one in added])
        self._known: dict[str, tuple[int, ...]] = {}
        # One number for each token, not one for each place where it is: those of common tokens
        # stay in the processor's caches.
        self._numbers: dict[int, int] = {}

    def encode(self, text: str) -> list[int] | None:
        """As the library does, without special tokens at the ends. None for a text with too many
        new words, which is the library's."""
        words = self._word.findall(text)
        found = list(map(self._known.get, words))
        if None in found:
            new = list({word: None for word, ids in zip(words, found, strict=True) if ids is None})
            if self._are_many(new, len(words)):
                self._learn([word for word in new if len(word) <= MAX_CHARACTERS][:FEW_WORDS])
                return None
            learned = self._learn(new)
            found = [
                learned[word] if ids is None else ids
                for word, ids in zip(words, found, strict=True)
            ]
        return list(chain.from_iterable(cast("list[tuple[int, ...]]", found)))

    def _are_many(self, new: list[str], num_words: int) -> bool:
        others = [word for word in new if not _is_plain(word)]
        return (
            len(others) > max(FEW_WORDS, num_words // NEW_ONE_IN)
            or len(new) > MANY_WORDS
            or sum(map(len, others)) > MANY_CHARACTERS
        )

    def _learn(self, words: list[str]) -> dict[str, tuple[int, ...]]:
        learned = {word: self._ids_of_plain(word) for word in words if _is_plain(word)}
        others = [word for word in words if word not in learned]
        encodings = self._tokenizer.encode_batch_fast(others, add_special_tokens=False)
        for word, encoding in zip(others, encodings, strict=True):
            learned[word] = self._same_numbers(encoding.ids)
        if len(self._known) + len(learned) > MAX_WORDS:
            self._known.clear()  # what is common is back at once
        for word, ids in learned.items():
            if len(word) <= MAX_CHARACTERS:
                self._known[word] = ids
        return learned

    def _ids_of_plain(self, word: str) -> tuple[int, ...]:
        """A word that is one piece to the pre-tokenizer, in a third of the time."""
        tokens = self._model.tokenize(word.replace(" ", SPACE))
        return self._same_numbers(token.id for token in tokens)

    def _same_numbers(self, ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._numbers.setdefault(token_id, token_id) for token_id in ids)


def _is_plain(word: str) -> bool:
    """Letters, perhaps a space in front."""
    letters = word[1:] if word[0] == " " else word
    return letters.isascii() and letters.isalpha()


def _word_pattern(added: list[str]) -> re.Pattern[str]:
    """Up to the next place to cut, or to one of those after it."""
    within = {
        right
        for text in added
        for left, right in pairwise(text)
        if re.match("[A-Za-z]", left) and not re.match("[A-Za-z]", right)
    }
    behind_letters = "".join(
        re.escape(character)
        for character in map(chr, range(128))
        if not character.isalpha() and character not in within
    )
    cut = rf"(?:(?<=[A-Za-z])(?=[{behind_letters}])|(?<=[!-~])(?= )|\Z)"
    part = "(?s:.)[^ A-Za-z]*+[A-Za-z]*+"
    return re.compile(rf" ?[A-Za-z]++(?=[{behind_letters}]|\Z)|{part}(?:(?!{cut}){part})*+")


def can_be_cut(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether texts may be encoded word by word."""
    model = tokenizer.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout:
        return False
    if _stages(tokenizer.normalizer, "normalizers"):
        return False
    if any(
        " " in added.content
        or _is_plain(added.content)
        or added.lstrip
        or added.rstrip
        or added.single_word
        for added in tokenizer.get_added_tokens_decoder().values()
    ):
        return False
    stages = _stages(tokenizer.pre_tokenizer, "pretokenizers")
    return (
        any(map(_cuts, stages))
        and all(_cuts(stage) or _is_harmless(stage) for stage in stages)
        and any(stage["type"] == "ByteLevel" for stage in stages)
    )


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
