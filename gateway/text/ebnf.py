"""Texts as grammars spell them."""


def ebnf_literal(text: str) -> str:
    """`text` in quotes; all but plain ASCII escaped."""
    spelled = "".join(
        one if one.isascii() and one.isprintable() and one not in '"\\' else f"\\U{ord(one):08x}"
        for one in text
    )
    return f'"{spelled}"'
