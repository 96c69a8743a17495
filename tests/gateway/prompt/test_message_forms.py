"""Calls of tools in templates of every construction that public checkpoints have."""

from pathlib import Path
from typing import Any

import pytest

from core.errors import InvalidRequest
from tests.gateway.prompt.served import text_of, with_template

# With spaces as no JSON writer puts them, so that text and object can be told apart.
ARGUMENTS = '{"city":"Bern" , "days": [1]}'
AS_JSON = '{"city": "Bern", "days": [1]}'
USER = {"role": "user", "content": "u"}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "r"}

EACH = "{% for m in messages %}{% if m['role'] != 'assistant' %}{{ m['content'] }}{% else %}"
CALLS = "{% for c in m['tool_calls'] %}{{ '[' + c['function']['name'] + ' ' + ARGS + ']' }}"
END = "{% endfor %}{% endif %}{% endfor %}"
AS_TEXT = CALLS.replace("ARGS", "c['function']['arguments']") + END
AS_OBJECT = CALLS.replace("ARGS", "c['function']['arguments'] | tojson") + END


def turn(arguments: str = ARGUMENTS, content: Any = None) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": content, "tool_calls": [call]}, RESULT]


# What the template does with a message, and what comes out for it.
CONSTRUCTIONS = {
    "searches in the content (R1-0528)": (
        "{% if '</think>' in m['content'] %}-{% endif %}" + AS_TEXT,
        f"[f {ARGUMENTS}]",
    ),
    "knows calls by no content (V3, R1)": (
        "{% if m['content'] is none %}" + AS_TEXT.replace(END, "")
        + "{% endfor %}{% else %}{{ m['content'] }}{% endif %}{% endif %}{% endfor %}",
        f"[f {ARGUMENTS}]",
    ),
    "writes the content": ("{{ m['content'] }}" + AS_OBJECT, f"[f {AS_JSON}]"),
    "writes lines, if there are any (GLM)": (
        "{% if m['content'] | string | trim %}\n{{ m['content'] }}{% endif %}" + AS_OBJECT,
        f"[f {AS_JSON}]",
    ),
    "writes JSON itself": (AS_OBJECT, f"[f {AS_JSON}]"),
    "writes JSON with arguments (GigaChat3)": (
        AS_OBJECT.replace("tojson", "tojson(ensure_ascii=False, separators=(',', ':'))"),
        '[f {"city":"Bern","days":[1]}]',
    ),
    "goes through the fields (GLM)": (
        CALLS.replace("' ' + ARGS", "''")
        + "{% for k, v in c['function']['arguments'].items() %}{{ k }}={{ v }};{% endfor %}" + END,
        "[f]city=Bern;days=[1];",
    ),
    "either, by type (Kimi K2)": (
        CALLS.replace("ARGS", "(a if a is string else a | tojson)").replace(
            "{{ '['", "{% set a = c['function']['arguments'] %}{{ '['"
        ) + END,
        f"[f {AS_JSON}]",
    ),
    "puts the arguments out as they are": (
        CALLS.replace("' ' + ARGS + ']'", "' '") + "{{ c['function']['arguments'] }}]" + END,
        f"[f {ARGUMENTS}]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("content", [None, "", []])
@pytest.mark.parametrize("name", CONSTRUCTIONS)
async def test_a_turn_that_only_calls(tmp_path: Path, name: str, content: Any) -> None:
    within, expected = CONSTRUCTIONS[name]
    model = with_template(tmp_path, EACH + within)
    assert await text_of(model, turn(content=content)) == f"u{expected}r"


@pytest.mark.parametrize("name", ["writes the content", "searches in the content (R1-0528)"])
async def test_a_turn_with_text_keeps_it(tmp_path: Path, name: str) -> None:
    within, expected = CONSTRUCTIONS[name]
    model = with_template(tmp_path, EACH + "{{ m['content'] }}" * (name[0] == "s") + within)
    assert await text_of(model, turn(content="None")) == f"uNone{expected}r"


@pytest.mark.parametrize(
    ("arguments", "as_text", "as_object"),
    [
        ("", "", "{}"),
        ("[1]", "[1]", '"[1]"'),
        ("{broken", "{broken", '"{broken"'),
        ("[" * 100_000, "[" * 100_000, '"' + "[" * 100_000 + '"'),
        ('{"a": null}', '{"a": null}', '{"a": null}'),
    ],
)
async def test_arguments_that_are_no_object(
    tmp_path: Path, arguments: str, as_text: str, as_object: str
) -> None:
    for form, expected in ((AS_TEXT, as_text), (AS_OBJECT, as_object)):
        model = with_template(tmp_path, EACH + form)
        assert await text_of(model, turn(arguments)) == f"u[f {expected}]r"


async def test_what_a_template_refuses_in_every_form(tmp_path: Path) -> None:
    model = with_template(tmp_path, EACH + "{{ raise_exception('calls not known') }}" + AS_TEXT)
    with pytest.raises(InvalidRequest, match="calls not known"):
        await text_of(model, turn())
