"""The OpenAPI document: every path, body, reply and status that there is."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from gateway.base.anthropic_error import is_anthropic
from gateway.messages_api.messages_models import AnthropicError, MessageReply, TokenCount
from gateway.messages_api.messages_request import CountTokensRequest, MessagesRequest
from gateway.replies.reply_models import (
    ChatCompletion,
    Completion,
    DetokenizeReply,
    ErrorReply,
    HealthReply,
    ModelList,
    ModelObject,
    TokenizeReply,
    VersionReply,
)
from gateway.requests.chat_request import ChatRequest
from gateway.requests.completion_request import CompletionRequest
from gateway.requests.tokenize_request import DetokenizeRequest, TokenizeRequest
from gateway.responses_api.responses_models import DeletedResponse, ResponseReply
from gateway.responses_api.responses_request import ResponsesRequest

JSON = "application/json"
# What any request may meet: a wrong key, and what should not happen.
ANY = (401, 500)
BODY = (400, 404, 408, 413, 415, *ANY)
GENERATION = (*BODY, 429, 499, 503, 504)


class Operation(NamedTuple):
    """Body and reply of one path; `reply` None: a text that is not JSON."""

    reply: type[BaseModel] | None
    errors: Sequence[int]
    body: type[BaseModel] | None = None
    streams: bool = False


# What stands there for a stream describes one event of it, as generators of clients read it.
EVENT: dict[str, Any] = {
    "type": "object",
    "description": "One server-sent event: a part of the reply as JSON; OpenAI's end with [DONE]",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("/v1/chat/completions", "post"): Operation(ChatCompletion, GENERATION, ChatRequest, True),
    ("/v1/completions", "post"): Operation(Completion, GENERATION, CompletionRequest, True),
    ("/v1/messages", "post"): Operation(MessageReply, GENERATION, MessagesRequest, True),
    ("/v1/messages/count_tokens", "post"): Operation(
        TokenCount, (*BODY, 429, 499, 503), CountTokensRequest
    ),
    ("/v1/responses", "post"): Operation(ResponseReply, GENERATION, ResponsesRequest, True),
    ("/v1/responses/{response_id}", "get"): Operation(ResponseReply, (400, 404, *ANY)),
    ("/v1/responses/{response_id}", "delete"): Operation(DeletedResponse, (400, 404, *ANY)),
    ("/tokenize", "post"): Operation(TokenizeReply, (*BODY, 429, 499, 503), TokenizeRequest),
    ("/detokenize", "post"): Operation(DetokenizeReply, (*BODY, 429, 499, 503), DetokenizeRequest),
    ("/v1/models", "get"): Operation(ModelList, ANY),
    ("/v1/models/{model_id}", "get"): Operation(ModelObject, (404, *ANY)),
    ("/version", "get"): Operation(VersionReply, ANY),
    ("/health", "get"): Operation(HealthReply, (503, *ANY)),
    ("/ready", "get"): Operation(HealthReply, (503, *ANY)),
    ("/metrics", "get"): Operation(None, ANY),
}


def describe(app: FastAPI, model_name: str) -> dict[str, Any]:
    """The document for `app`, which serves one model."""
    document: dict[str, Any] = get_openapi(
        title=app.title, version=app.version, openapi_version=app.openapi_version, routes=app.routes
    )
    document["components"] = {"schemas": _schemas(model_name)}
    for (path, method), described in OPERATIONS.items():
        error = AnthropicError if is_anthropic(path) else ErrorReply
        _fill(document["paths"][path][method], described, error)
    return document


def _fill(operation: dict[str, Any], described: Operation, error: type[BaseModel]) -> None:
    if described.body is not None:
        operation["requestBody"] = {"required": True, "content": _json_content(described.body)}
    if described.reply is None:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = _json_content(described.reply)
    if described.streams:
        content["text/event-stream"] = {"schema": EVENT}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    for status in sorted(described.errors):
        # Not a standard status, but the usual one for this.
        phrase = "Client Closed Request" if status == 499 else HTTPStatus(status).phrase
        responses[str(status)] = {"description": phrase, "content": _json_content(error)}
    operation["responses"] = responses


def _schemas(model_name: str) -> dict[str, Any]:
    bodies = [one.body for one in OPERATIONS.values() if one.body is not None]
    replies = [one.reply for one in OPERATIONS.values() if one.reply is not None]
    every: list[type[BaseModel]] = list(
        dict.fromkeys([*bodies, *replies, ErrorReply, AnthropicError])
    )
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(one, "validation") for one in every]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = definitions["$defs"]
    for body in bodies:
        named = schemas[body.__name__]["properties"].get("model", {})
        if "anyOf" in named:
            named["anyOf"][0] = {"type": "string", "enum": [model_name]}
        else:
            named["enum"] = [model_name]
    return schemas


def _json_content(model: type[BaseModel]) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
