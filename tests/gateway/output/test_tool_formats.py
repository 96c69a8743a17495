"""Each format of tool calls: what is written in it is read, streamed in every split."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.formats.deepseek_v3 import DEEPSEEK_V3
from gateway.formats.deepseek_v31 import DEEPSEEK_V31
from gateway.formats.gigachat3 import GIGACHAT3, GIGACHAT31
from gateway.formats.kimi_k2 import KIMI_K2
from gateway.formats.registry import TOOL_FORMATS, tool_format
from gateway.formats.tool_format import ToolFormat
from gateway.output.tool_call_parser import ToolCallParser

Read = tuple[str, list[tuple[str | None, str]]]

each_format = pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.models)


def read(form: ToolFormat, pieces: list[str], *, is_cut_off: bool = False) -> Read:
    """Content, and names and arguments of the calls, as a client joins them."""
    parser = ToolCallParser(form, at_most_one=False)
    parts = [parser.feed(piece) for piece in pieces]
    parts.append(parser.finish(is_cut_off=is_cut_off))
    deltas = [delta for _, some in parts for delta in some]
    names = {delta.index: delta.name for delta in deltas if delta.id is not None}
    assert sorted(names) == list(range(len(names)))
    arguments = dict.fromkeys(names, "")
    for delta in deltas:
        arguments[delta.index] += delta.arguments
    calls = [(name, arguments[index]) for index, name in names.items()]
    return "".join(text for text, _ in parts), calls


def marks_of(form: ToolFormat) -> list[str]:
    parts = (*form.marks, *form.begins, form.call_begin, form.call_end, form.tail, form.end)
    return [part for part in parts if part]


@cache
def texts(form: ToolFormat) -> st.SearchStrategy[str]:
    """Prose in which marks and parts of them may stand."""
    marks = st.sampled_from(marks_of(form))
    cut = st.tuples(marks, st.integers(1, 12)).map(lambda pair: pair[0][: pair[1]])
    words = st.sampled_from([" ", "\n", "a", '"', "\\", "{", "}", "]", "```", "é🙂", "function"])
    return st.lists(marks | cut | words, max_size=8).map("".join)


@cache
def values(form: ToolFormat) -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers() | texts(form)
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts(form), inner, max_size=3),
        max_leaves=6,
    )


NAMES = st.sampled_from(["weather", "f", "get-time_2", "function", "IDX", "NAME"])


@cache
def calls_of(form: ToolFormat) -> st.SearchStrategy[list[tuple[str, str]]]:
    dumped = st.builds(
        json.dumps, values(form), ensure_ascii=st.booleans(), indent=st.sampled_from([None, 1])
    )
    return st.lists(st.tuples(NAMES, dumped), min_size=1, max_size=3)


@cache
def outputs(form: ToolFormat) -> st.SearchStrategy[str]:
    call = calls_of(form).map(lambda calls: form.call(*calls[0]))
    return st.lists(texts(form) | call | call.map(form.write), max_size=4).map("".join)


@each_format
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read(form: ToolFormat, data: st.DataObject) -> None:
    """Calls, of which the strings hold marks."""
    wanted = data.draw(calls_of(form))[: 3 if form.has_several else 1]
    text = data.draw(st.sampled_from(["", "I look.", " a\n b"]))
    calls = [form.call(name, one, position) for position, (name, one) in enumerate(wanted)]
    output = text + data.draw(st.sampled_from(["", "\n"])) + form.write(*calls)
    assert read(form, pieces_of(data, output)) == (text, wanted)


def pieces_of(data: st.DataObject, output: str) -> list[str]:
    size = data.draw(st.integers(1, 9))
    first = data.draw(st.integers(0, size))
    cuts = range(first, len(output), size)
    return [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)], strict=True)]


@each_format
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_where_the_text_is_cut_makes_no_difference(form: ToolFormat, data: st.DataObject) -> None:
    """Marks in every place, calls that are whole and that are not."""
    output = data.draw(outputs(form))
    is_cut_off = data.draw(st.booleans())
    output = output[: data.draw(st.integers(0, len(output)))] if is_cut_off else output
    whole = read(form, [output], is_cut_off=is_cut_off)
    assert read(form, pieces_of(data, output), is_cut_off=is_cut_off) == whole
    if not whole[1] and not is_cut_off:
        assert whole[0] == output  # nothing gets lost


@each_format
@pytest.mark.parametrize("space", ["", " ", "\n", " \n "])
def test_prose_about_marks_is_as_it_was_written(form: ToolFormat, space: str) -> None:
    for mark in marks_of(form):
        output = f"The mark{space}{mark}{space}begins it.{space}"
        for size in (1, 5, len(output)):
            pieces = [output[at : at + size] for at in range(0, len(output), size)]
            assert read(form, pieces) == (output, [])


@each_format
@pytest.mark.parametrize("rest", ["", "junk", "f\n", " \n" + "x" * 600])
def test_what_becomes_no_call_is_text(form: ToolFormat, rest: str) -> None:
    output = f"a {form.begins[0]} \n{form.call_begin}{rest}{form.call_end}{form.end} b"
    is_bare_call = form == DEEPSEEK_V31 and rest == "junk"
    expected: Read = ("a b", [("junk", "{}")]) if is_bare_call else (output, [])
    assert read(form, list(output)) == read(form, [output]) == expected


@each_format
def test_prose_about_marks_is_not_held_back(form: ToolFormat) -> None:
    parser = ToolCallParser(form, at_most_one=False)
    assert parser.feed(f"See {form.begins[0]} or so: it begins ")[0].endswith("or so: it begins")


@each_format
@pytest.mark.parametrize("arguments", ["[1, {}]", '"a}b"', "5", "null", "true", "-1.5e3"])
def test_arguments_that_are_no_object_are_kept(form: ToolFormat, arguments: str) -> None:
    output = form.write(form.call("f", arguments))
    for size in (1, 3, len(output)):
        pieces = [output[at : at + size] for at in range(0, len(output), size)]
        assert read(form, pieces) == ("", [("f", arguments)])


@pytest.mark.parametrize("form", [DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2])
def test_broken_arguments_end_with_the_call(form: ToolFormat) -> None:
    output = form.write(
        form.call("f", '{"a": [1'), form.call("g", "no JSON", 1), form.call("h", "")
    )
    expected = [("f", ('{"a": [1' + form.tail)), ("g", "no JSON"), ("h", "{}")]
    assert read(form, list(output)) == read(form, [output]) == ("", expected)


def test_kimi_ids_are_the_models_own() -> None:
    calls = [KIMI_K2.call("f", "{}", 3), KIMI_K2.call("g", "{}", 4), KIMI_K2.call("f", "[]", 3)]
    parser = ToolCallParser(KIMI_K2, at_most_one=False)
    _, deltas = parser.feed(KIMI_K2.write(*calls))
    ids = [delta.id for delta in deltas if delta.id is not None]
    assert ids[:2] == ["functions.f:3", "functions.g:4"]
    assert len(set(ids)) == 3


KIMI_OUTPUT = (
    "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
)
GIGACHAT_OUTPUT = (
    "Let me see.<|message_sep|>\n\nfunction call<|role_sep|>\n"
    '{"name": "get_weather", "arguments": {"city": "Paris"}}'
)
V31_OUTPUT = (
    "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
V3_OUTPUT = (
    "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
GIGACHAT31_OUTPUT = (
    'Let me see.<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}'
)


@pytest.mark.parametrize(
    ("form", "output"),
    [
        (DEEPSEEK_V3, V3_OUTPUT),
        (DEEPSEEK_V3, V31_OUTPUT),
        (DEEPSEEK_V31, V31_OUTPUT),
        (KIMI_K2, KIMI_OUTPUT),
        (GIGACHAT3, GIGACHAT_OUTPUT),
        (GIGACHAT3, GIGACHAT_OUTPUT.replace("<|message_sep|>", "")),  # where it is not shown
        (GIGACHAT31, GIGACHAT31_OUTPUT),
    ],
)
def test_what_models_write(form: ToolFormat, output: str) -> None:
    """As the models' own documents have it."""
    assert read(form, [output]) == ("Let me see.", [("get_weather", '{"city": "Paris"}')])


def is_one_of(*marks: str) -> Callable[[str], bool]:
    return marks.__contains__


@pytest.mark.parametrize(
    ("name", "template", "marks", "expected"),
    [
        ("auto", "<｜tool▁sep｜>'\n```json\n'", (), DEEPSEEK_V3),
        ("auto", "<｜tool▁sep｜>", (), DEEPSEEK_V31),
        ("auto", "<|tool_calls_section_begin|>", (), KIMI_K2),
        ("auto", "'function call' <|role_sep|>", (), GIGACHAT3),
        ("auto", "'function call' <|role_sep|> <|function_call|>", (), GIGACHAT31),
        ("auto", "", KIMI_K2.marks, KIMI_K2),
        ("auto", "", (), DEEPSEEK_V3),
        ("gigachat3", "<|role_sep|><|function_call|>", (), GIGACHAT31),
        ("gigachat3", "", GIGACHAT3.marks, GIGACHAT3),
        ("kimi_k2", "<｜tool▁sep｜>", (), KIMI_K2),
    ],
)
def test_the_checkpoint_or_a_flag_chooses(
    name: Any, template: str, marks: tuple[str, ...], expected: ToolFormat
) -> None:
    assert tool_format(name, template, is_one_of(*marks)) == expected
