"""Refuses grammars that a compiler must not be given."""

from core.errors import InvalidRequest
from proto import generate_pb2

# Compilers take time by size, and stack by the number of rules; of brackets they count the depth.
MAX_GRAMMAR_BYTES = 2**20
MAX_LINES = 2048


def check_grammar(message: generate_pb2.Grammar) -> None:
    """Raises InvalidRequest for one that is empty or too large."""
    if not message.lark:
        raise InvalidRequest("the grammar is empty", param="grammar")
    num_bytes, num_lines = len(message.lark.encode()), message.lark.count("\n")
    if num_bytes > MAX_GRAMMAR_BYTES or num_lines > MAX_LINES:
        raise InvalidRequest(
            f"a grammar of {num_bytes} bytes and {num_lines} lines is more than"
            f" {MAX_GRAMMAR_BYTES} and {MAX_LINES}",
            param="grammar",
        )
