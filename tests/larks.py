"""Grammars as gateways write them, of no model's marks."""

from gateway.grammar.lark import lark_of


def regex(text: str) -> str:
    return lark_of({"kind": "regex", "text": text}, {}, {})


def ebnf(text: str) -> str:
    return lark_of({"kind": "ebnf", "text": text}, {}, {})


def json_schema(text: str) -> str:
    """Any object where `text` is empty."""
    return lark_of({"kind": "json_schema", "text": text}, {}, {})
