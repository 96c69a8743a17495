"""Ids of words put together, against those that the library gives the whole text."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from gateway.text import word_ids
from gateway.text.word_ids import WordIds, can_be_cut
from tests.gateway.model_folder import SPECIAL, THINK, make_tokenizer

DEMO_TOKENIZER = Path(__file__).parents[3] / "demo_model" / "checkpoint" / "tokenizer.json"
# As the published files have it, one with its line breaks as they are and one without.
DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
DEMO_WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
PIECES = (
    *"aabcdeXYZ", *"    ", *"\n\n\t\r", *".,;:!?'\"()-_/<|>", *"0123456789",
    *"\u00e9\u4e2d\u6587\u3042\U0001f642\u0301\xa0\x1c\x85\u2003\u180e",
    *SPECIAL, *THINK, *"<|>", "'s", "'ll", " the", "the", " and", "in", "  ", "\n ",
)  # fmt: skip


def splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    each = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*each, plain])


def with_splits(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """Any two of some characters are a token: where a text is cut shows in its ids."""
    characters = "\u0120\u010a\u0109\u010dabXYZ.,'1234"  # space, line feed, tab, return, ...
    merges = [(left, right) for left in characters for right in characters]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(left + right for left, right in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token) for token in THINK])
    return tokenizer


DIGITS = r"\p{N}{1,3}"
CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
KINDS = {
    "byte level": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "deepseek": lambda: splits(DIGITS, CHINESE, DEEPSEEK_WORDS),
    "deepseek, line breaks": lambda: splits(
        DIGITS, CHINESE, DEEPSEEK_WORDS.replace(r"\r", "\r").replace(r"\n", "\n")
    ),
    "demo": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), splits(DEMO_WORDS)]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_come_to_the_ids_of_the_whole(kind: str) -> None:
    tokenizer = with_splits(KINDS[kind]())
    assert can_be_cut(tokenizer)
    words = WordIds(tokenizer)
    source = random.Random()
    num_compared = 0
    for _ in range(3000):
        text = "".join(source.choices(PIECES, k=source.randint(0, 60)))
        if (ids := words.encode(text)) is not None:
            assert ids == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)
            num_compared += 1
    assert num_compared > 1000


def test_the_demo_model_is_cut() -> None:
    assert can_be_cut(Tokenizer.from_file(str(DEMO_TOKENIZER)))


def test_texts_with_many_new_words_are_left_to_the_library() -> None:
    words = WordIds(make_tokenizer())
    few = " ".join(f"{number}." for number in range(word_ids.FEW_WORDS))
    many = " ".join(f"{number}." for number in range(100, 100 + 3 * word_ids.FEW_WORDS))
    assert words.encode(few) is not None
    assert words.encode(many) is None
    assert words.encode(many) is None  # some of them are known by now
    assert words.encode(many) == make_tokenizer().encode(many).ids


def test_texts_that_would_keep_others_waiting_are_left_to_the_library() -> None:
    words = WordIds(make_tokenizer())
    letters = "abcdefghijklmnopqrstuvwxyz"
    text = " ".join(a + b for a in letters for b in letters)
    num_times = 0
    while (ids := words.encode(text)) is None:
        num_times += 1
    assert ids == make_tokenizer().encode(text).ids
    num_too_many = len(letters) ** 2 - word_ids.MANY_WORDS
    assert num_times == -(-num_too_many // word_ids.FEW_WORDS)
    assert words.encode("a b " + "\u6587" * word_ids.MANY_CHARACTERS) is None


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_ids, "MAX_WORDS", 20)
    tokenizer = make_tokenizer()
    words = WordIds(tokenizer)
    for number in range(100):
        text = f"the{number} the end of number {number} " + "x" * number
        assert words.encode(text) == tokenizer.encode(text).ids
        assert len(words._known) <= 20
        assert all(len(word) <= word_ids.MAX_CHARACTERS for word in words._known)


def _normalised(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def _with_added(**how: bool) -> Callable[[Tokenizer], None]:
    def add(tokenizer: Tokenizer) -> None:
        tokenizer.add_tokens([AddedToken("<mark>", **how)])

    return add


def _with_content(content: str) -> Callable[[Tokenizer], None]:
    def add(tokenizer: Tokenizer) -> None:
        tokenizer.add_tokens([AddedToken(content)])

    return add


def _split(*patterns: str) -> Callable[[Tokenizer], None]:
    def split(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = splits(*patterns)

    return split


def _not_in_bytes(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(DEMO_WORDS), "isolated")


def _prefixed(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def _with_dropout(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 0.5


def _word_level(tokenizer: Tokenizer) -> None:
    tokenizer.model = models.WordLevel({"a": 0}, unk_token="a")


@pytest.mark.parametrize(
    "change",
    [
        _normalised, _with_added(lstrip=True), _with_added(rstrip=True),
        _with_added(single_word=True), _with_content("<a mark>"), _with_content("mark"),
        _split(), _split(DIGITS, CHINESE),
        _split(r"\w+ ?"), _split(DEMO_WORDS, r"\w+ ?"), _not_in_bytes, _prefixed,
        _with_dropout, _word_level,
    ],
)  # fmt: skip
def test_other_tokenizers_are_not_cut(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = make_tokenizer()
    assert can_be_cut(tokenizer)
    change(tokenizer)
    assert not can_be_cut(tokenizer)


def test_a_normalizer_that_does_nothing_is_none() -> None:
    tokenizer = make_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([])
    assert can_be_cut(tokenizer)
