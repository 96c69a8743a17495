"""The token ids of words that were seen before: what a text is made of, most of the time.

A tokenizer of the byte-level kind cuts a text at added tokens, then by patterns into words, and
encodes each word by itself. The cutting costs the library most of its time, because it keeps
track of where everything came from. In ASCII text Python's `re` cuts the same in a tenth of it,
and words that are known need no encoding.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import tokenizers

from core.byte_level import BYTE_OF_CHARACTER
from core.log import get_logger
from gateway.ascii_pattern import UnknownPattern, piece_finder

log = get_logger("gateway.word_memory")

MAX_WORDS = 2**16
MAX_WORD_CHARACTERS = 64
# Words that one text may teach; with more that are new the library is as fast.
MAX_NEW_WORDS = 64

# What ByteLevel(use_regex=true) cuts with.
_BYTE_LEVEL_PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
_CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}

# Compared with the library at the start: every ASCII character beside many others.
_ASCII = "".join(map(chr, range(128)))
_SAMPLES = (
    _ASCII,
    " ".join(_ASCII),
    "I'm sure they'LL say it isn't so; we've 12 of 1,234.567 -- (see [x]_{y})...\n\n  \tDone.\r\n ",
    "a  b   c\n \n  d\t\te 1 22 333 4444 5a6 b7  8 \n9 x=y+z; <p>&amp;</p> \\ \"q\" `r` ~s^t|u$ 'T",
)

Splitter = Callable[[str], Iterable[str]]


class WordMemory:
    """Encodes as the library does, without what its post-processor would add."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        added: Sequence[Mapping[str, int]],
        splitters: Sequence[Splitter],
    ) -> None:
        """`added`: ids of added tokens by their texts, in the order of looking for them;
        `splitters` cut ASCII text into words, one behind the other."""
        self._tokenizer = tokenizer
        self._model = tokenizer.model
        self._added = [(_finder(ids), ids) for ids in added if ids]
        self._splitters = splitters
        self._words: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> "WordMemory | None":
        """None for a tokenizer that works in another way, or in one that is not known."""
        definition = json.loads(tokenizer.to_str())
        try:
            memory = cls(tokenizer, _added_tokens(definition), _splitters(definition))
        except UnknownPattern as reason:
            log.info("words are not remembered", reason=str(reason))
            return None
        for text in _SAMPLES:
            if memory.encode(text) != _encoded(tokenizer, text):
                log.warning("words are not remembered", reason="the library cuts otherwise")
                return None
        return memory

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, in which added tokens count as such."""
        return self._encode(text, 0)

    def _encode(self, text: str, level: int) -> list[int]:
        if level == len(self._added):
            return self._encode_plain(text) if text.isascii() else _encoded(self._tokenizer, text)
        finder, ids = self._added[level]
        parts = finder.split(text)
        if len(parts) == 1:
            return self._encode(text, level + 1)
        token_ids: list[int] = []
        for position, part in enumerate(parts):
            if position % 2:
                token_ids.append(ids[part])
            elif part:
                token_ids += self._encode(part, level + 1)
        return token_ids

    def _encode_plain(self, text: str) -> list[int]:
        words = [text]
        for splitter in self._splitters:
            words = list(chain.from_iterable(map(splitter, words)))
        try:
            return list(chain.from_iterable(map(self._words.__getitem__, words)))
        except KeyError:
            if self._learn(words):
                return list(chain.from_iterable(map(self._words.__getitem__, words)))
            return _encoded(self._tokenizer, text)

    def _learn(self, words: Sequence[str]) -> bool:
        """Whether all of `words` are known now."""
        new = [word for word in dict.fromkeys(words) if word not in self._words]
        if len(self._words) + len(new) > MAX_WORDS:
            self._words.clear()
            return False
        for word in new[:MAX_NEW_WORDS]:
            if len(word) <= MAX_WORD_CHARACTERS:
                spelled = "".join(map(_CHARACTER_OF_BYTE.__getitem__, word.encode()))
                self._words[word] = tuple(one.id for one in self._model.tokenize(spelled))
        return len(new) <= MAX_NEW_WORDS and all(len(one) <= MAX_WORD_CHARACTERS for one in new)


def _encoded(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    # The same ids as of `encode` in two thirds of the time: without offsets, which nobody wants.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    token_ids: list[int] = encoding.ids
    return token_ids


def _finder(ids: Mapping[str, int]) -> "re.Pattern[str]":
    """The longest of those that begin first."""
    texts = sorted(ids, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, texts))})")


def _added_tokens(definition: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Those that are looked for first, and those behind. Raises UnknownPattern."""
    tokens = [token for token in definition["added_tokens"] if token["content"]]
    if any(token[name] for token in tokens for name in ("single_word", "lstrip", "rstrip")):
        raise UnknownPattern("added tokens that take more than themselves")
    first = {token["content"]: token["id"] for token in tokens if not token["normalized"]}
    then = {token["content"]: token["id"] for token in tokens if token["normalized"]}
    return first, then


def _splitters(definition: Mapping[str, Any]) -> list[Splitter]:
    """Raises UnknownPattern for a tokenizer that does more than to cut into words."""
    normalizer = definition["normalizer"]
    if normalizer is not None and normalizer != {"type": "Sequence", "normalizers": []}:
        raise UnknownPattern("a normalizer")
    if definition["model"]["type"] != "BPE" or definition["model"].get("dropout"):
        raise UnknownPattern("a model other than BPE, or one that throws dice")
    outer = definition["pre_tokenizer"] or {"type": "none"}
    steps = outer["pretokenizers"] if outer["type"] == "Sequence" else [outer]
    patterns = [_pattern(step, is_last=step is steps[-1]) for step in steps]
    patterns = [pattern for pattern in patterns if pattern]
    # Those in front look for numbers and for scripts, the last one cuts everything.
    return [piece_finder(one, is_everywhere=one is patterns[-1]) for one in patterns]


def _pattern(step: Mapping[str, Any], *, is_last: bool) -> str:
    """What one step of the cutting looks for; "" for nothing. Raises UnknownPattern."""
    match step:
        case {"type": "Split", "pattern": {"Regex": str(source)}, "behavior": "Isolated"} if (
            not step["invert"] and not is_last
        ):
            return source
        case {"type": "Digits", "individual_digits": bool(single)} if not is_last:
            return r"\p{N}" if single else r"\p{N}+"
        case {"type": "ByteLevel", "add_prefix_space": False} if is_last:
            return _BYTE_LEVEL_PATTERN if step["use_regex"] else ""
        case _:
            raise UnknownPattern(f"{step['type']} at this place, or with these options")
