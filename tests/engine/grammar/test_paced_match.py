"""Drafts in a match: masks after them are those of an output that has them; no trace is left."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from core.clock import ManualClock
from engine.grammar import paced_match
from engine.grammar.grammar_match import GrammarCompiler
from engine.grammar.paced_match import PacedMatch, settle
from engine.sampling.history import Mask
from engine.sampling.sampling_params import Grammar
from tests.larks import ebnf, json_schema, regex
from tests.tiny_checkpoint import make_tiny_checkpoint

VOCAB, EOS, THINK_END = 260, 1, 7
GRAMMARS = {
    "words": Grammar(lark=regex("([a-c]{2}|x+y)*!")),
    "json": Grammar(lark=json_schema('{"type":"array","items":{"enum":["a",12]}}')),
    "nested": Grammar(lark=ebnf('root ::= "(" root ")" root | "x" [ab]+ "y"')),
    "later": Grammar(lark=regex("[a-c]{3}!"), after_token_id=THINK_END),
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return GrammarCompiler(folder, VOCAB, (EOS,))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    monkeypatch.setattr(paced_match, "PATIENCE_SECONDS", 60.0)
    with ThreadPoolExecutor(1) as pool:
        yield pool


def told(masks: Sequence[Mask]) -> list[tuple[bool, bytes]]:
    return [(mask.is_active, mask.words.tobytes() if mask.is_active else b"") for mask in masks]


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_after_drafts_are_those_of_an_output_with_them(
    compiler: GrammarCompiler, threads: ThreadPoolExecutor, name: str
) -> None:
    choose, num_ahead = random.Random(name), 0
    for _ in range(6):
        match = PacedMatch(compiler.match(GRAMMARS[name]), (), threads, ManualClock())
        settle([match])
        output: list[int] = []
        drafts: list[int] = []
        while match.is_ready and not match.is_complete and len(output) < 20:
            num_right = choose.randrange(len(match.masks))
            tokens = [*drafts[:num_right], drawn(match.masks[num_right], choose)]
            output += tokens
            expected, drafts, ends = ahead(compiler, name, output, choose)
            match.offer(tokens, drafts)
            settle([match])
            assert all(map(match.accept, tokens))
            assert match.fault() is None
            assert told(match.masks) == told(expected)
            assert match.is_complete == ends
            num_ahead += len(match.masks) - 1
    assert num_ahead > 3


def drawn(mask: Mask, choose: random.Random) -> int:
    if not mask.is_active and choose.random() < 0.3:
        return THINK_END
    return choose.choice([token for token in range(VOCAB) if mask.allows(token)])


def ahead(
    compiler: GrammarCompiler, name: str, output: Sequence[int], choose: random.Random
) -> tuple[list[Mask], list[int], bool]:
    """Drafts of which some may not come, masks of a match that takes them in after the output, as
    far as they may come without an end, and whether the output is one."""
    match = compiler.match(GRAMMARS[name])
    assert all(map(match.accept, output))
    masks, drafts, ends = [Mask(match.is_active, match.mask())], [EOS] * 4, match.is_complete
    for index in range(len(drafts) if not ends else 0):
        drafts[index] = drawn(masks[-1], choose)
        if choose.random() < 0.1:
            drafts[index] = choose.randrange(VOCAB)
        if not match.accept(drafts[index]) or match.is_complete:
            break
        masks.append(Mask(match.is_active, match.mask()))
    return masks, drafts, ends


def test_right_drafts_are_no_end_before_the_last_token(
    compiler: GrammarCompiler, threads: ThreadPoolExecutor
) -> None:
    letters = [compiler.texts.index(text) for text in (b"a", b"b", b"!")]
    match = PacedMatch(compiler.match(GRAMMARS["words"]), (), threads, ManualClock())
    settle([match])
    assert match.is_ready
    match.offer(letters)
    settle([match])
    for index, letter in enumerate(letters):
        assert match.accept(letter)
        assert match.is_complete == (index == 2)


def test_drafts_are_left_alone_where_there_is_no_time(
    compiler: GrammarCompiler, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = compiler.texts.index(b"a")
    match = PacedMatch(compiler.match(GRAMMARS["words"]), (), threads, ManualClock())
    settle([match])
    assert match.is_ready
    monkeypatch.setattr(paced_match, "PATIENCE_SECONDS", -1.0)
    match.offer([a], [a, a, a])
    assert match.job is not None
    match.job.result()
    assert match.accept(a)
    assert len(match.masks) == 1
