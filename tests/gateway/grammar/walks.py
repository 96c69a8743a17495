"""Outputs of random tokens, as the masks of a worker's grammar let them be."""

import random
from functools import cache
from pathlib import Path

from tokenizers import AddedToken

from engine.grammar import grammar_match
from engine.sampling import sampling_params
from gateway.formats.registry import TOOL_FORMATS
from proto.generate_pb2 import Grammar
from tests.gateway.model_folder import EOS_ID, make_tokenizer

MARKS = sorted({mark for form in TOOL_FORMATS for mark in form.marks})
TOKENIZER = make_tokenizer()
TOKENIZER.add_tokens([AddedToken(mark, special=True) for mark in MARKS])
VOCAB_SIZE = TOKENIZER.get_vocab_size()


def begin(folder: Path, grammar: Grammar) -> grammar_match.GrammarMatch:
    return worker(folder).match(sampling_params._grammar(grammar))


@cache
def worker(folder: Path) -> grammar_match.GrammarCompiler:
    return grammar_match.GrammarCompiler(folder, VOCAB_SIZE, (EOS_ID,))


def allowed(match: grammar_match.GrammarMatch) -> list[int]:
    words = match.mask()
    return [token for token in range(VOCAB_SIZE) if words[token // 32] >> (token % 32) & 1]


def walk(match: grammar_match.GrammarMatch, choose: random.Random) -> str:
    """An output, as its marks spell it."""
    return TOKENIZER.decode(walked(match, choose), skip_special_tokens=False)


def walked(match: grammar_match.GrammarMatch, choose: random.Random) -> list[int]:
    """Tokens of an output; marks and quotes are likelier than letters."""
    tokens: list[int] = []
    while not match.is_complete:
        assert len(tokens) < 2000
        may = allowed(match)
        likely = [token for token in may if token > 260 or TOKENIZER.id_to_token(token) in '"}]!']
        token = choose.choice(likely if likely and choose.random() < 0.5 else may)
        assert match.accept(token)
        if token == EOS_ID:
            break
        tokens.append(token)
    return tokens
