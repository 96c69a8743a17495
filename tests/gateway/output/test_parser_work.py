"""What the parser of tool calls does for each piece does not grow with what came before."""

import pytest

from gateway.formats.deepseek_v3 import DEEPSEEK_V3
from gateway.formats.deepseek_v31 import DEEPSEEK_V31
from gateway.formats.gigachat3 import GIGACHAT3, GIGACHAT31
from gateway.formats.kimi_k2 import KIMI_K2
from gateway.formats.tool_format import ToolFormat
from gateway.output.tool_call_parser import MAX_HEAD, PIECE_CHARACTERS, ToolCallParser

FORMATS = (DEEPSEEK_V3, DEEPSEEK_V31, GIGACHAT3, GIGACHAT31, KIMI_K2)
NUM_PIECES = 2500


def texts_of(parser: ToolCallParser) -> int:
    """Characters of its texts: the most that one move copies or searches. What it keeps in pieces
    it does not touch."""
    return sum(len(each) for each in vars(parser).values() if isinstance(each, str))


def openings(form: ToolFormat) -> dict[str, str]:
    """What brings the parser into each of its states."""
    head = form.begins[0] + form.call_begin + form.head_of("f", "0")
    call = form.begins[0] + form.call("f", '{"a": 1}')
    return {
        "text": "x",
        "begun": form.begins[0],
        "call begun": form.begins[0] + form.call_begin,
        "object": head + "{",
        "string": head + '{"a": "',
        "number": head + "1",
        "tail": head + "{}x",
        "between": call,
        "after all": call + form.end,
    }


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name} {form.begins[0]!r}")
@pytest.mark.parametrize("state", openings(DEEPSEEK_V3))
@pytest.mark.parametrize("piece", [" ", "a", "<"])
def test_pieces_without_end_cost_the_same_each(form: ToolFormat, state: str, piece: str) -> None:
    parser = ToolCallParser(form, at_most_one=False)
    opening = openings(form)[state]
    content, calls = parser.feed(opening)
    most = 0
    for _ in range(NUM_PIECES):
        more, deltas = parser.feed(piece)
        most = max(most, texts_of(parser))
        content += more
        calls += deltas
    assert most <= PIECE_CHARACTERS + MAX_HEAD
    more, deltas = parser.finish(is_cut_off=False)
    content += more
    told = content + "".join(call.arguments for call in [*calls, *deltas])
    if state in ("text", "begun", "call begun"):
        assert told == opening + piece * NUM_PIECES
    elif piece.strip():  # blanks around a call, and around what is in it, mean nothing
        assert told.count(piece) >= NUM_PIECES


def test_a_large_piece_is_looked_at_in_parts() -> None:
    """Else each of its marks would copy all of the rest."""
    parser = ToolCallParser(DEEPSEEK_V31, at_most_one=False)
    sizes: list[int] = []
    take_for_text = parser._take_for_text  # noqa: SLF001

    def counted() -> None:
        sizes.append(texts_of(parser))
        take_for_text()

    parser._take_for_text = counted  # type: ignore[method-assign]  # noqa: SLF001
    text = DEEPSEEK_V31.begins[0] * NUM_PIECES
    content, _ = parser.feed(text)
    rest, _ = parser.finish(is_cut_off=False)
    assert content + rest == text
    assert len(sizes) >= NUM_PIECES - 1
    assert max(sizes) <= 2 * PIECE_CHARACTERS
