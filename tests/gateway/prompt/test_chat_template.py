"""Chat templates, against transformers' own renderer."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from core.errors import CheckpointError, InvalidRequest
from gateway.prompt.chat_template import ChatTemplate
from tests.gateway.model_folder import TEMPLATE

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": 'Be "brief" & <kind>.'},
    {"role": "user", "content": "Grüße\n  日本 "},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "b"},
]
TEMPLATES = {
    "tests": TEMPLATE,
    "blocks and whitespace": (
        "{%- set ns = namespace(n=0) -%}\n{% for m in messages %}\n"
        "  {%- set ns.n = ns.n + 1 %}\n    {{ ns.n }}: {{ m.content | trim }}\n{% endfor %}\n"
    ),
    "tojson": "{{ messages | tojson }} {{ messages | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m['role'] }}{% endfor %}",
    "date": "{{ strftime_now('%Y-%m-%d') }}",
    "undefined": "[{{ nothing }}] {{ tools is none }} {{ add_generation_prompt }}",
    "autoescape": "{{ messages[0]['content'] }}",
}
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_as_transformers_renders_it(name: str) -> None:
    source = TEMPLATES[name]
    (expected,), _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=True, **SPECIAL
    )
    assert ChatTemplate(source, SPECIAL).render(MESSAGES) == expected


@pytest.mark.parametrize("name", ["tests", "tojson", "undefined"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_variables_and_tools_as_transformers(name: str, add_generation_prompt: bool) -> None:
    source = TEMPLATES[name] + "{{ mood }} {{ tools | tojson if tools else '' }}"
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    (expected,), _ = render_jinja_template(
        [MESSAGES],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        mood="good",
        **SPECIAL,
    )
    template = ChatTemplate(source, SPECIAL)
    assert template.knows_tools
    rendered = template.render(
        MESSAGES,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        variables={"mood": "good"},
    )
    assert rendered == expected


@pytest.mark.parametrize("text", ["The answer", "The answer \n", " 日本"])
def test_a_final_message_is_continued_as_in_transformers(text: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": text}]
    for source in (TEMPLATE, TEMPLATE.replace("message['content'] +", "message['content']|trim +")):
        (expected,), _ = render_jinja_template(
            [messages], chat_template=source, continue_final_message=True, **SPECIAL
        )
        rendered = ChatTemplate(source, SPECIAL).render(
            messages, add_generation_prompt=False, continued=text
        )
        assert rendered == expected


@pytest.mark.parametrize("text", ["e", "<", "of", "end", "end\u2581of", "\uff5c>", "e "])
def test_a_final_message_whose_text_is_in_what_ends_a_turn(text: str) -> None:
    source = "{{ '<U>' + messages[0].content + '<A>' + messages[1].content + eos_token }}"
    special = {"eos_token": "<\uff5cend\u2581of\u2581sentence\uff5c>"}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    rendered = ChatTemplate(source, special).render(messages, continued=text)
    assert rendered == f"<U>hi<A>{text}"


def test_a_final_message_that_is_left_out_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        ChatTemplate("{{ messages[0].content }}", {}).render(MESSAGES, continued="zz")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_a_template_refuses_is_the_clients_fault(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.param == "messages"


def test_sources(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    assert ChatTemplate.load(tmp_path, {}) is None
    config.write_text("{}")
    assert ChatTemplate.load(tmp_path, {}) is None

    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for value, expected in (("one", "one"), (named, "d")):
        config.write_text(json.dumps({"chat_template": value}))
        template = ChatTemplate.load(tmp_path, {})
        assert template is not None
        assert template.render([]) == expected

    (tmp_path / "chat_template.jinja").write_text("own file")
    template = ChatTemplate.load(tmp_path, {})
    assert template is not None
    assert template.render([]) == "own file"


@pytest.mark.parametrize("value", ["{% for %}", 5])
def test_bad_templates_are_named(tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match="template"):
        ChatTemplate.load(tmp_path, {})
