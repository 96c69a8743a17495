"""Chat templates that others ship, rendered as transformers renders them."""

import ast
import copy
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from core.errors import InvalidRequest
from demo_model.training.settings import CHECKPOINT_PATH
from gateway.prompt.chat_template import ChatTemplate
from gateway.prompt.message_forms import as_templates_read
from gateway.requests.chat_request import ChatRequest

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
FETCHED = {"trl": (), "llama-cpp-python": ("--no-binary", "llama-cpp-python")}

ARGUMENTS = '{"city": "Zürich {x}", "days": [1, 2.5, true, null], "deep": {"a": "<é>"}}'
OF_ARGUMENTS = "{x}"
USER = {"role": "user", "content": "Grüße\n  日本 "}
SYSTEM = {"role": "system", "content": 'Be "brief" & <kind>.'}
RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "18 °C"}
AGAIN = {"role": "user", "content": "and now?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Weather <é> & "more"',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Zürich", "b"]}},
            "required": ["city"],
        },
    },
}


def assistant(content: str | None, *arguments: str, **fields: str) -> dict[str, Any]:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "weather", "arguments": text}}
        for i, text in enumerate(arguments, 1)
    ]
    return {"role": "assistant", "content": content, **fields} | (
        {"tool_calls": calls} if calls else {}
    )


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, assistant("<think>hm</think>\n\na"), AGAIN],
    "call without text": [USER, assistant(None, ARGUMENTS), RESULT],
    "call and later turn": [SYSTEM, USER, assistant("", ARGUMENTS), RESULT, assistant("18"), AGAIN],
    "call with text": [USER, assistant("I look.", ARGUMENTS), RESULT],
    "two calls": [
        USER, assistant("I look.", ARGUMENTS, "{}"), RESULT, RESULT | {"tool_call_id": "call_2"},
    ],
    "reasoning": [USER, assistant("a", reasoning_content="hm"), AGAIN],
    "reasoning and call": [USER, assistant(None, ARGUMENTS, reasoning_content="hm"), RESULT],
}  # fmt: skip


def installed() -> Iterator[tuple[str, str]]:
    """The demo model's, and those that are strings in modules of transformers."""
    config = json.loads((CHECKPOINT_PATH / "tokenizer_config.json").read_text())
    yield "demo model", config["chat_template"]
    for path in Path(transformers.__file__).parent.glob("models/*/processing_*.py"):
        source = path.read_text()
        if "in messages" not in source or "{%" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            value = getattr(node, "value", None)
            if isinstance(value, str) and "{%" in value and "in messages" in value:
                yield path.stem, value


def theirs(
    source: str, messages: list[dict[str, Any]], tools: Any, content: Any, *, objects: bool
) -> str | None:
    """With `content` for none: left out where it is ..., as `apply_chat_template` does."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", ()) if objects else ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if "tool_calls" in message and not message["content"]:
            message["content"] = content
            if content is ...:
                del message["content"]
    try:
        (text,), _ = render_jinja_template(
            [messages], chat_template=source, tools=tools, add_generation_prompt=True, **SPECIAL
        )
    except Exception:  # noqa: BLE001 - whatever templates raise
        return None
    return str(text)


def ours(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any) -> str | None:
    body = ChatRequest(model="m", messages=messages, tools=tools)
    try:
        return template.render(
            [as_templates_read(message) for message in body.template_messages()],
            tools=[tool.model_dump(exclude_none=True) for tool in body.tool_use().offered] or None,
        )
    except InvalidRequest:
        return None


def differences(source: str) -> list[str]:
    """Conversations that come out otherwise than from transformers, in any of its forms of a call
    without text that leaves no call out; a form that it renders is never refused."""
    wrong = []
    template = ChatTemplate(source, SPECIAL)
    for name, messages in CONVERSATIONS.items():
        has_calls = "call" in name
        tools, contents = ([TOOL], (..., None, "")) if has_calls else (None, ("",))
        every: set[str] = set()
        for objects in (True, False) if has_calls else (True,):
            forms = (theirs(source, messages, tools, one, objects=objects) for one in contents)
            texts = {text for text in forms if text is not None}
            whole = {text for text in texts if OF_ARGUMENTS in text or not has_calls}
            every = whole or every or texts
            if whole:
                break
        text = ours(template, messages, tools)
        if text not in (every or {None}):
            wrong.append(name)
    return wrong


def all_differences(templates: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    return {name: wrong for name, source in templates if (wrong := differences(source))}


def test_installed_templates() -> None:
    templates = list(installed())
    assert len(templates) > 2
    assert all_differences(templates) == {}


def fetched(package: str, folder: Path) -> dict[str, str]:
    """The templates in a package's file, which is not installed. Skips where there is no index."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    done = subprocess.run(
        [*command, *FETCHED[package], package], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.skip(f"cannot fetch {package}: {done.stderr.strip()[-300:]}")
    (path,) = folder.iterdir()
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".jinja")]
            return {name: wheel.read(name).decode() for name in names}
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.name.endswith(".jinja")]
        files = {member.name: archive.extractfile(member) for member in members}
        return {name: file.read().decode() for name, file in files.items() if file}


@pytest.mark.slow
@pytest.mark.parametrize("package", FETCHED)
def test_templates_of_public_models(tmp_path: Path, package: str) -> None:
    templates = fetched(package, tmp_path)
    assert len(templates) > 50
    assert all_differences(templates.items()) == {}
