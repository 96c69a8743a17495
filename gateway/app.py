"""The ASGI application: routes, error handlers, middleware."""

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from core.errors import EpserveError, ModelNotFound, Unavailable
from core.version import software_version
from gateway.api_document import describe
from gateway.base.openai_error import error_response, on_epserve_error, on_http_exception
from gateway.frontend import Frontend
from gateway.http.body_form import BodyForm
from gateway.http.body_limit import BodyLimit
from gateway.http.direct_routes import DirectRoutes
from gateway.http.request_scope import RequestScope
from gateway.limits.api_keys import ApiKeys
from gateway.limits.key_guard import KeyGuard
from gateway.translated_apis import TranslatedApis

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
# What scripts of a page from elsewhere may read.
EXPOSED_HEADERS = (
    "x-request-id", "retry-after",
    *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset")
      for kind in ("requests", "tokens")),
)  # fmt: skip


def create_app(frontend: Frontend, keys: ApiKeys) -> ASGIApp:
    """The whole application around one frontend, with the keys that it takes."""
    app = FastAPI(
        title="epserve",
        version=software_version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # to where a foreign Host header says
    )
    app.add_exception_handler(EpserveError, on_epserve_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    translated = TranslatedApis(frontend)
    _add_generation(app, frontend)
    _add_messages(app, translated)
    _add_responses(app, translated)
    _add_tokens(app, frontend)
    _add_models(app, frontend)
    _add_operation(app, frontend)
    document = describe(app, frontend.model.name)
    app.openapi = lambda: document  # type: ignore[method-assign]
    settings = frontend.settings
    paths = frozenset(document["paths"])
    endpoints = {
        CHAT_PATH: frontend.chat,
        COMPLETIONS_PATH: frontend.complete,
        MESSAGES_PATH: translated.messages,
        RESPONSES_PATH: translated.respond,
    }
    edge: ASGIApp = BodyLimit(
        DirectRoutes(app, endpoints, frontend.serving.metrics),
        max_bytes=settings.max_body_bytes,
        timeout_seconds=settings.body_timeout_seconds,
    )
    edge = BodyForm(
        edge, origins=settings.cors_origins, takes_unasked=settings.allow_cross_site_forms
    )
    edge = KeyGuard(
        edge,
        keys,
        frontend.serving.limiter,
        frontend.serving.metrics,
        guards_all=settings.guard_all_paths,
    )
    if settings.cors_origins:
        # Around the guard: browsers ask without a key whether they may send one.
        edge = CORSMiddleware(
            edge,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    return RequestScope(edge, frontend.serving.metrics, paths, frontend.serving.admission)


def _add_generation(app: FastAPI, frontend: Frontend) -> None:
    # For the document and for what is no POST: those are taken by `DirectRoutes` before. The
    # bodies are read by our own stricter code; `api_document` describes them.
    @app.post(CHAT_PATH)
    async def create_chat_completion(request: Request) -> Response:
        """A reply to a conversation, whole or as server-sent events."""
        return await frontend.chat(request)

    @app.post(COMPLETIONS_PATH)
    async def create_completion(request: Request) -> Response:
        """A continuation of one or several prompts, whole or as server-sent events."""
        return await frontend.complete(request)


def _add_messages(app: FastAPI, translated: TranslatedApis) -> None:
    @app.post(MESSAGES_PATH)
    async def create_message(request: Request) -> Response:
        """Anthropic's API: a reply to a conversation, whole or as server-sent events."""
        return await translated.messages(request)

    @app.post(MESSAGES_PATH + "/count_tokens")
    async def count_message_tokens(request: Request) -> Response:
        """Anthropic's API: how many tokens the prompt of a message has."""
        return await translated.count_tokens(request)


def _add_responses(app: FastAPI, translated: TranslatedApis) -> None:
    @app.post(RESPONSES_PATH)
    async def create_response(request: Request) -> Response:
        """A response to a conversation of items, whole or as server-sent events."""
        return await translated.respond(request)

    @app.get(RESPONSES_PATH + "/{response_id}")
    async def get_response(request: Request, response_id: str) -> Response:
        """A response that was stored."""
        return await translated.stored_response(request, response_id)

    @app.delete(RESPONSES_PATH + "/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forgets a response that was stored."""
        return await translated.stored_response(request, response_id)


def _add_tokens(app: FastAPI, frontend: Frontend) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of the prompt that a chat comes to."""
        return await frontend.tokenize(request)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text that token ids stand for."""
        return await frontend.detokenize(request)


def _add_models(app: FastAPI, frontend: Frontend) -> None:
    created = int(time.time())

    def model_object() -> dict[str, Any]:
        return {
            "id": frontend.model.name,
            "object": "model",
            "created": created,
            "owned_by": "epserve",
            "max_model_len": frontend.max_model_len,
        }

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The models served here: one."""
        return {"object": "list", "data": [model_object()]}

    @app.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> dict[str, Any]:
        """One model by its name, which may contain slashes."""
        if model_id != frontend.model.name:
            raise ModelNotFound(f"The model {model_id[:256]!r} does not exist.")
        return model_object()


def _add_operation(app: FastAPI, frontend: Frontend) -> None:
    admission = frontend.serving.admission

    # Probes that get a 503 are answered, not raised: nothing has gone wrong here.
    @app.get("/health", response_class=Response)
    async def health() -> Response:
        """200 while the cluster takes requests."""
        if problem := frontend.heartbeat.problem:
            return error_response(Unavailable(problem))
        return Response(b'{"status":"ok"}', media_type="application/json")

    @app.get("/ready", response_class=Response)
    async def ready() -> Response:
        """As /health, but 503 from the moment on that this process is asked to stop."""
        if admission.is_draining:
            return error_response(Unavailable("the gateway is shutting down"))
        return await health()

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        """The version of this software."""
        return {"version": app.version}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus exposition; with several workers, of all together."""
        frontend.serving.metrics.tasks.set(len(asyncio.all_tasks()))
        content = generate_latest(frontend.serving.metrics.exposed())
        return Response(content, headers={"content-type": CONTENT_TYPE_LATEST})
