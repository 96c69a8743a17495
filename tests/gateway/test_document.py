"""The OpenAPI document is true: replies fit it, and it says everything."""

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.gateway.conftest import MODEL, Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "think"}], "temperature": 0}
REPLIES: list[tuple[str, dict[str, Any] | None]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "two calls"}],
                                     "tools": TOOLS}),
    ("/v1/chat/completions", CHAT | {"temperature": 9}),
    ("/v1/chat/completions", CHAT | {"model": "other"}),
    ("/v1/completions", {"model": MODEL, "prompt": "plain"}),
    ("/v1/completions", {"model": MODEL, "prompt": "plain", "logprobs": 2, "echo": True}),
    ("/v1/completions", {"model": MODEL, "prompt": []}),
    ("/v1/responses", {"model": MODEL, "input": "think"}),
    ("/v1/responses", {"model": MODEL, "input": "new calls", "max_output_tokens": 40,
                       "tools": [{"type": "function", "name": "time"}]}),
    ("/v1/responses", {"model": MODEL, "input": 1}),
    ("/v1/responses/other", None),
    ("/v1/messages", CHAT | {"max_tokens": 99}),
    ("/v1/messages", CHAT | {"max_tokens": 300,
                             "messages": [{"role": "user", "content": "new calls"}],
                             "tools": [{"name": "t", "input_schema": {}}]}),
    ("/v1/messages", CHAT),
    ("/v1/messages", CHAT | {"max_tokens": 99, "model": "other"}),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": CHAT["messages"]}),
    ("/v1/messages/count_tokens", {"model": MODEL}),
    ("/tokenize", {"prompt": "plain", "return_token_strs": True}),
    ("/tokenize", {"prompt": "plain"}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/detokenize", {"tokens": [-1]}),
    ("/v1/models", None),
    (f"/v1/models/{MODEL}", None),
    ("/v1/models/other", None),
    ("/version", None),
    ("/health", None),
    ("/ready", None),
]  # fmt: skip


async def document_of(gateway: Gateway) -> dict[str, Any]:
    document: dict[str, Any] = (await gateway.client.get("/openapi.json")).json()
    return document


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for part in value.values():
            yield from references(part)
    elif isinstance(value, list):
        for part in value:
            yield from references(part)


async def test_every_reference_leads_somewhere(gateway: Gateway) -> None:
    document = await document_of(gateway)
    found = set(references(document))
    assert found
    for reference in found:
        target: Any = document
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]


async def test_every_path_is_described(gateway: Gateway) -> None:
    document = await document_of(gateway)
    assert {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model_id}",
        "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
        "/v1/responses/{response_id}",
        "/tokenize", "/detokenize", "/version", "/health", "/ready", "/metrics",
    } <= set(document["paths"])  # fmt: skip
    for methods in document["paths"].values():
        for operation in methods.values():
            assert "422" not in operation["responses"]
            assert {"200", "401", "500"} <= set(operation["responses"])
            assert operation["responses"]["200"]["content"]


async def test_bodies_are_described(gateway: Gateway) -> None:
    schemas = (await document_of(gateway))["components"]["schemas"]
    names = set(schemas["ChatRequest"]["properties"])
    assert {"messages", "tools", "response_format", "logit_bias", "chat_template_kwargs"} <= names
    assert schemas["CompletionRequest"]["properties"]["model"]["enum"] == [MODEL]
    assert "schema" in schemas["JsonSchemaFormat"]["properties"]


@pytest.mark.parametrize(("path", "body"), REPLIES)
async def test_replies_fit(gateway: Gateway, path: str, body: dict[str, Any] | None) -> None:
    document = await document_of(gateway)
    method = "get" if body is None else "post"
    reply = await gateway.client.request(method, path, json=body)
    template = path
    for described in ("/v1/models/{model_id}", "/v1/responses/{response_id}"):
        if path.startswith(described.partition("{")[0]):
            template = described
    responses = document["paths"][template][method]["responses"]
    schema = responses[str(reply.status_code)]["content"]["application/json"]["schema"]
    jsonschema.validate(reply.json(), {**schema, "components": document["components"]})


async def test_streams_are_described_event_by_event(gateway: Gateway) -> None:
    """As generators of clients and of tests read the schema of a text/event-stream."""
    document = await document_of(gateway)
    for path in ("/v1/chat/completions", "/v1/completions"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        jsonschema.validate({"data": "[DONE]"}, content["text/event-stream"]["schema"])
