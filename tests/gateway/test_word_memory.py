"""Words that are remembered, against the tokenizers library: never another id."""

import json
import random
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from gateway import word_memory
from gateway.ascii_pattern import UnknownPattern, piece_finder
from gateway.word_memory import WordMemory

TEXTS = [
    "It's what we're told: they'll say 12,345.67 -- or don't, and I've    no   idea.\n\n\tEnd. ",
    "def f(x):\n    return [x ** 2 for _ in range(10)]\r\n\r\nprint(f(3)) # HELLO World i'LL",
    "the sun and the rain and the wind, the sun and the rain and the wind" * 3,
]
V3_SPLIT = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
USER, THINK, NEWLINES = "<｜User｜>", "<think>", "\n\n\n"


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_level(*, use_regex: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


CUTTING = {
    "deepseek-v3": [
        split(r"\p{N}{1,3}"),
        split("[一-龥぀-ゟ゠-ヿ]+"),
        split(V3_SPLIT),
        byte_level(),
    ],
    "llama-3": [split(LLAMA3_SPLIT), byte_level()],
    "gpt-2": [byte_level(use_regex=True)],
    "digits": [pre_tokenizers.Digits(True), byte_level(use_regex=True)],
    "numbers": [pre_tokenizers.Digits(False), byte_level()],
    "gaps": [split(r"\p{Lu}+|[0-4]"), byte_level()],
}


def make(cutting: list[Any]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cutting)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(
        [AddedToken(THINK, normalized=True), AddedToken("<think", normalized=True)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(USER, normalized=False), AddedToken(NEWLINES, normalized=False)]
    )
    return tokenizer


TOKENIZERS = {name: make(cutting) for name, cutting in CUTTING.items()}
PARTS = (
    USER, THINK, "<think", NEWLINES, "\n", "\r\n", "  ", "'ll", "'S", "ſ", "é", "中文", "'",
    "\u00a0", *" ".join(TEXTS).split(" "),
)  # fmt: skip


def some_text(source: random.Random) -> str:
    """Parts that matter, ASCII, and now and then any character."""
    parts = []
    for _ in range(source.randrange(25)):
        ascii_part = "".join(chr(source.randrange(128)) for _ in range(source.randrange(9)))
        other = chr(source.choice((source.randrange(0xD800), source.randrange(0xE000, 0x11000))))
        parts.append(source.choices((source.choice(PARTS), ascii_part, other), (12, 6, 1))[0])
    return source.choice(("", " ")).join(parts)


def encoded(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids


@pytest.mark.parametrize("name", CUTTING)
def test_ids_are_those_of_the_library(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    memory = WordMemory.of(tokenizer)
    assert memory is not None

    source = random.Random(name)
    for text in (*TEXTS, *(some_text(source) for _ in range(400))):
        expected = encoded(tokenizer, text)
        assert memory.encode(text) == expected, repr(text)
        assert memory.encode(text) == expected, repr(text)  # by what it has learned


def test_only_texts_of_new_words_go_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["deepseek-v3"]
    memory = WordMemory.of(tokenizer)
    assert memory is not None
    asked: list[str] = []

    def encode(library: tokenizers.Tokenizer, text: str) -> list[int]:
        asked.append(text)
        return encoded(library, text)

    monkeypatch.setattr(word_memory, "_encoded", encode)
    few = f"{USER}we're told{THINK} the rain"
    many = " ".join(f"w{chr(97 + number % 26)}{chr(97 + number // 26)}" for number in range(150))
    long = "x" * 65
    for text in (few, many, many, many, long, long, "é rain", few):
        assert memory.encode(text) == encoded(tokenizer, text)
    # Of the many some are learned each time, until all of them are known.
    assert asked == [many, many, long, long, "é rain"]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["deepseek-v3"]
    memory = WordMemory.of(tokenizer)
    assert memory is not None
    monkeypatch.setattr(word_memory, "MAX_WORDS", 40)
    memory._words.clear()
    for number in range(200):
        text = f" {'abcdefghij'[number % 10]}{'klmnopqrst'[number // 10 % 10]}u rain"
        assert memory.encode(text) == encoded(tokenizer, text)
        assert len(memory._words) <= 40


def test_tokenizers_of_other_kinds_are_left_to_the_library() -> None:
    changes: dict[str, Any] = {
        "normalizer": {"type": "NFC"},
        "model": {"dropout": 0.5},
        "added": {"lstrip": True},
        "last": {"add_prefix_space": True},
        "split": {"behavior": "MergedWithPrevious"},
        "inverted": {"invert": True},
        "pattern": {"pattern": {"Regex": r"\w+"}},
        "text": {"pattern": {"String": "a"}},
    }
    for name, change in changes.items():
        definition = json.loads(TOKENIZERS["llama-3"].to_str())
        steps = definition["pre_tokenizer"]["pretokenizers"]
        if name == "normalizer":
            definition["normalizer"] = change
        elif name == "model":
            definition["model"] |= change
        elif name == "added":
            definition["added_tokens"][0] |= change
        else:
            steps[-1 if name == "last" else 0].update(change)
        assert WordMemory.of(tokenizers.Tokenizer.from_str(json.dumps(definition))) is None, name
    lower = make(CUTTING["gpt-2"])
    lower.normalizer = normalizers.Lowercase()
    assert WordMemory.of(lower) is None
    bare = tokenizers.Tokenizer(models.BPE())
    assert WordMemory.of(bare) is None


def test_a_translation_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(source: str, *, is_everywhere: bool) -> Any:
        return piece_finder("[a-y]+", is_everywhere=is_everywhere)

    monkeypatch.setattr(word_memory, "piece_finder", wrong)
    assert WordMemory.of(TOKENIZERS["llama-3"]) is None


@pytest.mark.parametrize(
    "source",
    [
        r"\w+", r"a.", r"^a", r"a$", r"(a)", r"(?<=a)b", r"a*+", r"a+?", r"a{2}+", r"[a[b]]", "#",
        r"[a&&b]", r"[a", r"(?:a", r"a)", r"\p{Greek}", r"\p{^L}", r"\P{L}", r"\h", "a{,3}", "*",
        r"[\S]", "a*", "\\", r"\1", r"[z-a]",
    ],
)  # fmt: skip
def test_patterns_that_are_not_sure_are_refused(source: str) -> None:
    with pytest.raises(UnknownPattern):
        piece_finder(source, is_everywhere=True)


@pytest.mark.parametrize("is_everywhere", [False, True])
def test_pieces_are_matches_and_what_is_between(is_everywhere: bool) -> None:
    def pieces(source: str, text: str) -> list[str]:
        return list(piece_finder(source, is_everywhere=is_everywhere)(text))

    assert pieces(r"\p{Lu}\p{Ll}*", "ab Cd--eF") == ["ab ", "Cd", "--e", "F"]
    assert pieces(r"[\p{M}\p{L}]+|\p{M}", "a1b") == ["a", "1", "b"]
    assert pieces(r"[^\p{M}]", "a1") == ["a", "1"]
