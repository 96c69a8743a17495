"""Tool calls: found in the output, forced by grammars, told to the template."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from core.errors import Unavailable
from core.token_ids import unpack_ids
from gateway.formats.deepseek_v3 import DEEPSEEK_V3
from gateway.formats.deepseek_v31 import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from gateway.output.tool_call_parser import ToolCallParser
from tests.gateway.conftest import ANSWERS, TOKENIZER, Gateway, running_gateway, v3_call
from tests.gateway.fake_cluster import FakeCluster, Plan
from tests.gateway.model_folder import TEMPLATE, make_model_folder
from tests.gateway.stream import join
from tests.larks import accepts

pytestmark = pytest.mark.asyncio(loop_scope="module")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    function = {"name": name, "description": f"tells {name}", "parameters": parameters}
    return {"type": "function", "function": function}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(
    shared_cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """With room for what tells the model of its tools."""
    folder = make_model_folder(
        tmp_path_factory.mktemp("tools") / "model", max_position_embeddings=4096
    )
    async with running_gateway(shared_cluster, folder) as gateway:
        yield gateway


TOOLS = [tool("weather", city={"type": "string"}), tool("time", zone={"type": "string"})]
CALLS: dict[str, tuple[str | None, list[tuple[str, str]]]] = {
    "one call": ("I look.", [("weather", '{"city": "Zürich {x}"}')]),
    "two calls": (
        None,
        [("weather", '{"city":"Bern"}'), ("time", '{"zone": {"name": "a\\"}", "n": [1, 2]}}')],
    ),
    "new calls": (None, [("time", '{"zone":"CET"}')]),
    "bare call": (None, [("now", "{}")]),
}


@pytest.mark.parametrize("step_tokens", [1, 3, 50])
@pytest.mark.parametrize("case", CALLS)
async def test_calls_are_found(gateway: Gateway, case: str, step_tokens: int) -> None:
    gateway.cluster.first.plan.step_tokens = step_tokens
    content, calls = CALLS[case]
    (choice,) = (await gateway.chat(case, tools=TOOLS)).json()["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == content
    functions = [call["function"] for call in message["tool_calls"]]
    assert [(one["name"], one["arguments"]) for one in functions] == calls
    assert all(re.fullmatch("call_[0-9a-f]{24}", call["id"]) for call in message["tool_calls"])

    (joined,), _ = join(await gateway.chat(case, tools=TOOLS, stream=True), chat=True)
    assert joined.finish_reason == "tool_calls"
    assert joined.text == (content or "")
    assert [(call["name"], call["arguments"]) for call in joined.calls] == calls
    assert len({call["id"] for call in joined.calls}) == len(calls)
    assert joined.reasoning == message.get("reasoning_content", "")


@pytest.mark.parametrize("num_before", range(0, 130, 13))
async def test_a_moved_request_is_told_alike(gateway: Gateway, num_before: int) -> None:
    """Thoughts, marks and arguments: wherever the worker fails."""
    expected = (await gateway.chat("two calls", tools=TOOLS)).json()
    gateway.cluster.first.plan = Plan(fail_after=num_before, error=Unavailable("gone"))
    (joined,), _ = join(await gateway.chat("two calls", tools=TOOLS, stream=True), chat=True)
    message = expected["choices"][0]["message"]
    assert gateway.cluster.second.requests
    assert joined.reasoning == message["reasoning_content"]
    assert [(call["name"], call["arguments"]) for call in joined.calls] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]


async def test_arguments_come_as_they_are_made(gateway: Gateway) -> None:
    gateway.cluster.first.plan.step_seconds = 0.003
    reply = await gateway.chat("one call", tools=TOOLS, stream=True)
    deltas = [line for line in reply.text.splitlines() if '"arguments":' in line]
    assert len(deltas) > 1  # what waits together comes together


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_it_is_text(gateway: Gateway, fields: dict[str, Any]) -> None:
    (choice,) = (await gateway.chat("one call", **fields)).json()["choices"]
    assert choice["message"]["content"] == ANSWERS["one call"]
    assert choice["finish_reason"] == "stop"


async def test_only_one_call_where_only_one_is_wanted(gateway: Gateway) -> None:
    (choice,) = (await gateway.chat("two calls", tools=TOOLS, parallel_tool_calls=False)).json()[
        "choices"
    ]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


@pytest.mark.parametrize("stop", ["\n", "```", '"', "}"])
@pytest.mark.parametrize("step_tokens", [1, 50])
@pytest.mark.parametrize("min_tokens", [0, 20])
async def test_stop_strings_do_not_count_in_calls(
    gateway: Gateway, stop: str, step_tokens: int, min_tokens: int
) -> None:
    """They would leave a call without its arguments, also where they begin to count in
    the middle of its mark."""
    gateway.cluster.first.plan.step_tokens = step_tokens
    asked = {"tools": TOOLS, "stop": stop, "min_tokens": min_tokens}
    (choice,) = (await gateway.chat("two calls", **asked)).json()["choices"]
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(one["name"], one["arguments"]) for one in functions] == CALLS["two calls"][1]
    assert choice["finish_reason"] == "tool_calls"


async def test_stop_strings_count_in_front_of_calls(gateway: Gateway) -> None:
    (choice,) = (await gateway.chat("one call", tools=TOOLS, stop=" lo")).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I", "stop")


@pytest.mark.parametrize("step_tokens", [1, 50])
async def test_stop_strings_count_behind_a_mark_in_prose(
    gateway: Gateway, step_tokens: int
) -> None:
    gateway.cluster.first.plan.step_tokens = step_tokens
    (choice,) = (await gateway.chat("no call", tools=TOOLS, stop="ing")).json()["choices"]
    assert choice["message"]["content"] == ANSWERS["no call"].removesuffix("ing")


async def test_stop_strings_do_not_count_where_calls_are_forced(gateway: Gateway) -> None:
    asked = {"tools": TOOLS, "tool_choice": "required", "stop": "<"}
    (choice,) = (await gateway.chat("new calls", **asked)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"


async def test_cut_off_in_a_call(gateway: Gateway) -> None:
    num_tokens = len(TOKENIZER.encode(ANSWERS["one call"].partition("rich")[0]).ids)
    (choice,) = (await gateway.chat("one call", tools=TOOLS, max_tokens=num_tokens)).json()[
        "choices"
    ]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Zü'


@pytest.mark.parametrize("before", [CALL_BEGIN, "weather", "\n```json"])
async def test_cut_off_in_front_of_the_arguments(gateway: Gateway, before: str) -> None:
    """Marks that the model was about to go on with are no text for a client to show."""
    num_tokens = len(TOKENIZER.encode(ANSWERS["one call"].partition(before)[0]).ids)
    asked = {"tools": TOOLS, "max_tokens": num_tokens}
    (choice,) = (await gateway.chat("one call", **asked)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "length")
    assert "tool_calls" not in choice["message"]
    (joined,), _ = join(await gateway.chat("one call", **asked, stream=True), chat=True)
    assert (joined.text, joined.finish_reason) == ("I look.", "length")


async def test_marks_without_a_call_are_text(gateway: Gateway) -> None:
    (choice,) = (await gateway.chat("no call", tools=TOOLS)).json()["choices"]
    assert choice["message"]["content"] == ANSWERS["no call"]
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("choice", "matching", "other"),
    [
        ("required", ("weather", "time", "weather time"), ("nothing",)),
        ({"type": "function", "function": {"name": "time"}}, ("time",), ("weather", "time time")),
    ],
)
async def test_a_grammar_forces_calls(
    gateway: Gateway,
    model_folder: Path,
    choice: Any,
    matching: tuple[str, ...],
    other: tuple[str, ...],
) -> None:
    await gateway.chat("one call", tools=TOOLS, tool_choice=choice)
    (request,) = gateway.cluster.first.requests
    lark = request.sampling.grammar.lark
    arguments = {"weather": '{"city":"Bern"}', "time": '{"zone":"CET"}'}

    def output(names: str) -> str:
        calls = [v3_call(name, arguments.get(name, "{}")) for name in names.split()]
        return CALLS_BEGIN + "\n".join(calls) + CALLS_BEGIN.replace("begin", "end")

    for names in matching:
        assert accepts(model_folder, lark, output(names))
    for names in other:
        assert not accepts(model_folder, lark, output(names))
    wrong = output(matching[0]).replace('"}', '","more":1}')
    assert not accepts(model_folder, lark, wrong)


async def test_a_constraint_leaves_calls_possible(gateway: Gateway, model_folder: Path) -> None:
    """The answer keeps to it; a model that may call tools still can."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wrapped = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    calls = CALLS_BEGIN + v3_call("weather", '{"city":"Bern","days":[1]}') + CALLS_END
    for fields, answer, wrong in (
        ({"response_format": wrapped}, '{"n":5}', '{"n":"5"}'),
        ({"response_format": {"type": "json_object"}}, '{"a":[{}]}', "[1]"),
        ({"guided_regex": "[0-9]+"}, "12", "a"),
        ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
    ):
        gateway.cluster.router.reset()
        reply = await gateway.chat("one call", tools=TOOLS, **fields)
        assert reply.status_code == 200, reply.text
        (request,) = gateway.cluster.first.requests
        lark = request.sampling.grammar.lark
        for text in (answer, calls, calls.replace("weather", "time")):
            assert accepts(model_folder, lark, text), text
        for text in (wrong, answer + calls, calls.replace("weather", "nobody"), CALLS_BEGIN):
            assert not accepts(model_folder, lark, text), text


async def test_forced_calls_beside_a_format(gateway: Gateway) -> None:
    """Clients send the format on every turn; a call is not an answer."""
    wanted = {"tools": TOOLS, "tool_choice": "required"}
    wrapped = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "integer"}}}
    for fields in ({}, {"response_format": {"type": "json_object"}}, {"response_format": wrapped}):
        assert (await gateway.chat("one call", **wanted, **fields)).status_code == 200
    first, *others = (one.sampling.grammar for one in gateway.cluster.first.requests)
    assert "weather" in first.lark
    assert others == [first, first]
    reply = await gateway.chat("one call", **wanted, guided_regex="a")
    assert reply.json()["error"]["param"] == "guided_regex"


async def test_strict_schemas_that_cannot_be_kept_to(gateway: Gateway) -> None:
    """Named where they stand, whether calls are forced or not."""
    bad = tool("bad", x={"not": {"const": 1}})
    bad["function"]["strict"] = True
    for choice in ("auto", {"type": "function", "function": {"name": "bad"}}):
        reply = await gateway.chat("plain", tools=[*TOOLS, bad], tool_choice=choice)
        assert reply.json()["error"]["param"] == "tools[2].function.parameters"


async def test_calls_in_the_form_that_a_flag_names(
    shared_cluster: FakeCluster, tmp_path: Path
) -> None:
    shared_cluster.router.reset()
    folder = make_model_folder(tmp_path / "model", max_position_embeddings=4096)
    async with running_gateway(shared_cluster, folder, tool_call_parser="kimi_k2") as gateway:
        body = (await gateway.chat("kimi call", tools=TOOLS)).json()
        (joined,), _ = join(await gateway.chat("kimi call", tools=TOOLS, stream=True), chat=True)
    message = body["choices"][0]["message"]
    assert message["content"] == "I look."
    (call,) = message["tool_calls"]
    assert call["id"] == joined.calls[0]["id"] == "functions.weather:0"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Zürich"}'}


async def test_auto_forces_nothing(gateway: Gateway) -> None:
    await gateway.chat("plain", tools=TOOLS, tool_choice="auto")
    (request,) = gateway.cluster.first.requests
    assert not request.sampling.HasField("grammar")


async def prompt_of(gateway: Gateway, **fields: Any) -> str:
    reply = await gateway.post("/v1/chat/completions", **fields)
    assert reply.status_code == 200, reply.text
    (request,) = gateway.cluster.first.requests
    return TOKENIZER.decode(list(unpack_ids(request.prompt_token_ids)), skip_special_tokens=False)


async def test_tools_are_told_to_a_model_whose_template_does_not(gateway: Gateway) -> None:
    messages = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "hi"}]
    prompt = await prompt_of(gateway, messages=messages, tools=TOOLS)
    assert prompt.startswith("<|bos|>Be good.\n\n## Tools\n")
    assert "### weather\nDescription: tells weather\n\nParameters: {" in prompt
    assert prompt.index(CALL_BEGIN) < prompt.index("<|User|>hi")


async def test_tools_are_told_in_the_form_of_the_template(
    shared_cluster: FakeCluster, tmp_path: Path
) -> None:
    """V3.1's template renders calls without fences, and no tools either."""
    shared_cluster.router.reset()
    folder = make_model_folder(tmp_path / "model", max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(TEMPLATE + "{# " + SEPARATOR + " #}")
    messages = [{"role": "user", "content": "hi"}]
    async with running_gateway(shared_cluster, folder) as gateway:
        prompt = await prompt_of(gateway, messages=messages, tools=TOOLS)
    call = f'{CALL_BEGIN}TOOL_NAME{SEPARATOR}{{"argument": "value"}}{CALL_END}'
    assert f"{CALLS_BEGIN}{call}{CALLS_END}" in prompt


async def test_tools_are_left_to_a_template_that_knows_them(
    shared_cluster: FakeCluster, tmp_path: Path
) -> None:
    shared_cluster.router.reset()
    folder = make_model_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:"
        "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
        "{{ m.content is none }};{{ m.tool_call_id }}|{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]  # fmt: skip
    async with running_gateway(shared_cluster, folder) as gateway:
        prompt = await prompt_of(gateway, messages=messages, tools=TOOLS)
    told, _, rest = prompt.partition("]user:")
    assert json.loads(told + "]") == TOOLS
    assert rest == 'False;|assistant:weather{"city": "Bern"}True;|tool:False;c1|'


OUTPUTS = [
    ANSWERS["one call"],
    "text " + CALLS_BEGIN + v3_call("f", '{"a": "<｜tool"}') + "\n" + v3_call("g", "{}"),
    "a <｜tool▁calls",
    CALLS_BEGIN + CALL_BEGIN + "half",
    CALLS_BEGIN + v3_call("f", '{"a": "' + "\\" * 7 + '"'),
]


@pytest.mark.parametrize("output", OUTPUTS)
async def test_where_the_text_is_cut_makes_no_difference(output: str) -> None:
    def read(size: int) -> tuple[str, list[tuple[int, str | None, str]]]:
        parser = ToolCallParser(DEEPSEEK_V3, at_most_one=False)
        parts = [parser.feed(output[at : at + size]) for at in range(0, len(output), size)]
        parts.append(parser.finish(is_cut_off=False))
        calls: dict[int, tuple[int, str | None, str]] = {}
        for delta in (delta for _, deltas in parts for delta in deltas):
            _, name, arguments = calls.get(delta.index, (delta.index, delta.name, ""))
            calls[delta.index] = (delta.index, name, arguments + delta.arguments)
        return "".join(text for text, _ in parts), list(calls.values())

    whole = read(len(output))
    for size in (1, 2, 3, 7, 20):
        assert read(size) == whole
