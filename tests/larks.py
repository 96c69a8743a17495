"""Grammars as gateways write them, of no model's marks; and what they let through."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from engine.grammar.grammar_match import GrammarCompiler
from engine.sampling.sampling_params import Grammar
from gateway.grammar.lark import lark_of


def regex(text: str) -> str:
    return lark_of({"kind": "regex", "text": text}, {}, {})


def ebnf(text: str) -> str:
    return lark_of({"kind": "ebnf", "text": text}, {}, {})


def json_schema(text: str) -> str:
    """Any object where `text` is empty."""
    return lark_of({"kind": "json_schema", "text": text}, {}, {})


def accepts(folder: Path, lark: str, text: str) -> bool:
    """Whether an output of the model in `folder` may be `text`, and end behind it."""
    compiler, tokenizer = _model(folder)
    match = compiler.match(Grammar(lark=lark))
    if not all(map(match.accept, tokenizer.encode(text, add_special_tokens=False).ids)):
        return False
    eos = compiler.eos_token_ids[0]
    return match.is_complete or bool(match.mask()[eos // 32] >> eos % 32 & 1)


@cache
def _model(folder: Path) -> tuple[GrammarCompiler, Tokenizer]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
    return GrammarCompiler(folder, None, (eos,)), tokenizer
