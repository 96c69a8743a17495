"""What a client may get wrong: the right status, OpenAI's object, and no worker bothered."""

import json
from typing import Any

import httpx
import pytest

from core.errors import InternalError, InvalidRequest, ModelNotFound, Overloaded, Unavailable
from tests.gateway.conftest import MODEL, Gateway
from tests.gateway.model_folder import MAX_POSITION, VOCAB_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="module")


def error_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    body: dict[str, Any] = reply.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


TOOLS = [{"type": "function", "function": {"name": "f"}}]

SHARED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 2000}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"user": []}, "user"),
    ({"service_tier": -1}, "service_tier"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"verbosity": {}}, "verbosity"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"guided_regex": "a{4294967297}"}, "guided_regex"),
    ({"guided_grammar": 'root ::= "\\U00110000"'}, "guided_grammar"),
    ({"guided_json": {"type": []}}, "guided_json"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    ({"stream_options": 5, "stream": True}, "stream_options"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"presence_penalty": "much"}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"repetition_penalty": 11}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"five": 1}}, "logit_bias.five"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"priority": "high"}, "priority"),
    ({"suffix": "x"}, "suffix"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
     "response_format.json_schema.name"),
    ({"guided_regex": "a("}, "guided_regex"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"type": "object"}, "guided_regex": "a"}, "guided_regex"),
    ({"stop_regex": "a"}, "stop_regex"),
    ({"lora_path": "a"}, "lora_path"),
    ({"custom_logit_processor": "a"}, "custom_logit_processor"),
    ({"store": True}, "store"),
]  # fmt: skip
COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[5], []]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [5, "a"]}, "prompt[0]"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "n"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": 0, "echo": False}, "max_tokens"),
    ({"echo": "yes"}, "echo"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 129, "stream": False}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
]
CHAT: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "nobody", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [1]}]},
     "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
     "messages[0].function_call"),
    ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0]"),
    ({"messages": [{"role": "function", "content": "4"}]}, "messages[0].role"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]},
     "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
    ({"tools": TOOLS * 2}, "tools"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
      "tool_choice": "required"}, "tools[0].function.parameters"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"messages": [{"role": "user", "content": "hi", "prefix": True}]}, "messages[0].prefix"),
    ({"messages": [{"role": "assistant", "content": "a", "prefix": True},
                   {"role": "user", "content": "hi"}]}, "messages[0].prefix"),
    ({"messages": [{"role": "assistant", "content": "a", "prefix": True}],
      "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": [{"role": "assistant", "content": "", "prefix": True}]}, "messages"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"thinking": True}, "thinking"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"include_reasoning": "no"}, "include_reasoning"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
]  # fmt: skip


async def refused(gateway: Gateway, path: str, body: dict[str, Any], param: str | None) -> None:
    reply = await gateway.client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    error = error_of(reply)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert not gateway.cluster.router.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("change", "param"), SHARED + COMPLETIONS)
async def test_completions(
    gateway: Gateway, change: dict[str, Any], param: str | None, stream: bool
) -> None:
    body = {"model": MODEL, "prompt": "plain", "stream": stream} | change
    await refused(gateway, "/v1/completions", body, param)


SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "nope"}, "type must be one of"),
    ({"$ref": "#/$defs/nope"}, "leads nowhere"),
    ({"$ref": "#/x/1", "x": [{"type": "null"}]}, "leads nowhere"),
    ({"$ref": "#/x/0", "x": [{"contains": {}}]}, "contains is not supported"),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {}}, "leads nowhere"),
    ({"$ref": "https://example.com/schema"}, "nothing outside"),
    ({"$ref": "#"}, "back to itself"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
     "back to itself"),
    ({"type": "string", "pattern": "(["}, "unclosed"),
    ({"type": "string", "pattern": "a(?=b)b"}, "look-ahead"),
    ({"type": "string", "pattern": "^(?=a)b|c"}, "#: look-ahead"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
    ({"type": "string", "pattern": "^a{3}$", "minLength": 5}, "empty"),
    ({"enum": []}, "enum"),
    ({"not": {"type": "string"}}, "not is not supported"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "incompatible types"),
    ({"anyOf": [{"type": "string"}], "type": "integer"}, "incompatible types"),
    ({"anyOf": []}, "anyOf"),
    ({"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False},
     "required property 'a'"),
    ({"type": [["string"]], "minLength": 1}, "type must be one of"),
    ({"type": "number", "multipleOf": 0}, "multipleOf"),
    ({"type": "object", "properties": {"a": {"type": "array", "items": {"if": {}}}}},
     "#/properties/a/items"),
    ({"type": "object", "properties": 5}, "properties"),
    (False, "no output"),
    (5, "object"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "reason"), SCHEMAS)
async def test_schemas_that_cannot_be_kept_to(gateway: Gateway, schema: Any, reason: str) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    as_text = json.dumps(schema)
    forms: list[tuple[str, Any]] = [("guided_json", as_text)]
    if isinstance(schema, dict):
        forms += [("response_format", wrapped), ("guided_json", schema)]
    for field, value in forms:
        reply = await gateway.chat("plain", **{field: value})
        assert reply.status_code == 400, reply.text
        error = error_of(reply)
        assert error["param"].startswith(field)
        assert reason in error["message"]
        assert ".cc:" not in error["message"]
    assert not gateway.cluster.router.requests


async def test_a_deep_schema(gateway: Gateway) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    reply = await gateway.chat("plain", guided_json=schema)
    assert reply.status_code == 400
    assert "deep" in error_of(reply)["message"]


@pytest.mark.parametrize(("change", "param"), SHARED + CHAT)
async def test_chat(gateway: Gateway, change: dict[str, Any], param: str | None) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | change
    await refused(gateway, "/v1/chat/completions", body, param)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"5", b'"text"', b"\xff\xfe", b'{"model": NaN}',
        b'{"model": Infinity}', b'{"temperature": 1e999}', b'{"a": 1} trailing',
        b"[" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"{'model': 1}",
        b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud800"}',
    ],
)  # fmt: skip
async def test_what_is_not_json(gateway: Gateway, path: str, content: bytes) -> None:
    reply = await gateway.client.post(path, content=content)
    assert reply.status_code == 400, reply.text
    error_of(reply)
    assert not gateway.cluster.router.requests


@pytest.mark.parametrize("half", ['"\\ud83d\\u0041"', '"a\\udc00 b"'])
async def test_half_surrogates(gateway: Gateway, half: str) -> None:
    for path, body in (
        ("/v1/completions", f'{{"model":"{MODEL}","prompt":{half}}}'),
        ("/v1/completions", f'{{"model":"{MODEL}","prompt":"a","stop":{half}}}'),
        (
            "/v1/chat/completions",
            f'{{"model":"{MODEL}","messages":[{{"role":"user","content":{half}}}]}}',
        ),
    ):
        reply = await gateway.client.post(path, content=body.encode())
        assert reply.status_code == 400, reply.text
        error_of(reply)


async def test_unknown_model(gateway: Gateway) -> None:
    for path, content in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        reply = await gateway.client.post(path, json={"model": "other"} | content)
        assert reply.status_code == 404
        error = error_of(reply)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "status"),
    [
        (MAX_POSITION, 1, 400),
        (MAX_POSITION + 100, None, 400),
        (MAX_POSITION - 1, None, 200),
        (MAX_POSITION - 1, 1, 200),
        (MAX_POSITION - 1, 2, 400),
        (MAX_POSITION - 20, 21, 400),
        (MAX_POSITION - 20, 20, 200),
    ],
)
async def test_context_length(
    gateway: Gateway, prompt_tokens: int, max_tokens: int | None, status: int
) -> None:
    reply = await gateway.complete([5] * prompt_tokens, max_tokens=max_tokens)
    assert reply.status_code == status
    if status == 400:
        error = error_of(reply)
        assert error["code"] == "context_length_exceeded"
        assert str(MAX_POSITION) in error["message"]
        assert not gateway.cluster.router.requests


async def test_context_length_in_chat(gateway: Gateway) -> None:
    reply = await gateway.chat("a" * (MAX_POSITION + 1))
    assert reply.status_code == 400
    assert error_of(reply)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/health", 405, "method_not_allowed"),
        ("GET", "/docs", 404, "not_found"),
    ],
)
async def test_paths_and_methods(
    gateway: Gateway, method: str, path: str, status: int, code: str
) -> None:
    reply = await gateway.client.request(method, path)
    assert reply.status_code == status
    assert error_of(reply)["code"] == code
    if status == 405:
        assert reply.headers["allow"]


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "inf", ""])
async def test_bad_timeout_header(gateway: Gateway, value: str) -> None:
    reply = await gateway.client.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "plain"},
        headers={"x-request-timeout": value},
    )
    assert reply.status_code == 400
    assert error_of(reply)["param"] == "x-request-timeout"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("queue is full", retry_after_seconds=6.2), 429, "overloaded"),
        (InvalidRequest("never fits", param="prompt"), 400, "invalid_value"),
        (ModelNotFound("no such model"), 404, "model_not_found"),
        (InternalError("broken"), 500, "internal"),
    ],
)
async def test_what_the_router_refuses(
    gateway: Gateway, error: Any, status: int, code: str, stream: bool
) -> None:
    gateway.cluster.router.errors.append(error)
    reply = await gateway.complete(stream=stream)
    assert reply.status_code == status
    assert error_of(reply)["code"] == code
    assert reply.headers.get("retry-after") == ("7" if status == 429 else None)


async def test_unavailable_has_retry_after(gateway: Gateway) -> None:
    gateway.cluster.router.errors.extend([Unavailable("nobody", retry_after_seconds=3)] * 50)
    reply = await gateway.complete()
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "3"
