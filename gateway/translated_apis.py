"""APIs beside OpenAI's two older ones: each body becomes a chat request, which is answered in that
API's form. What holds for chats (failover, grammars, limits, traces, metrics) holds for them."""

from dataclasses import dataclass
from functools import partial

from fastapi import Request, Response

from core.errors import InvalidRequest, NotFound
from gateway.cluster.job import Job
from gateway.frontend import Frontend
from gateway.limits.key_guard import CLIENT
from gateway.messages_api import chat_of_messages as messages_api
from gateway.messages_api.messages_reply import MessagesReply
from gateway.messages_api.messages_request import CountTokensRequest, MessagesRequest
from gateway.prompt.chat_prompt import make_chat_prompt
from gateway.replies.reply_form import ReplyForm, encode_json
from gateway.requests.field_names import field_names
from gateway.requests.request_body import read_body
from gateway.responses_api import chat_of_responses as responses_api
from gateway.responses_api.responses_reply import ResponsesReply
from gateway.responses_api.responses_request import ResponsesRequest


@dataclass(frozen=True, slots=True)
class TranslatedApis:
    """Their endpoints; they raise as the frontend's do."""

    frontend: Frontend

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages."""
        arrived_at = self.frontend.admit()
        body = await read_body(request, MessagesRequest)
        max_tokens = body.max_tokens

        def reply(job: Job) -> ReplyForm:
            return MessagesReply(job, self.frontend.model.name, max_tokens)

        with field_names(messages_api.FIELD_NAMES):
            return await self.frontend.answer(
                messages_api.chat_of(body), request, arrived_at, "messages", reply,
                default_max_tokens=max_tokens,
            )  # fmt: skip

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        body = await read_body(request, CountTokensRequest)
        self.frontend.check_model(body.model)
        rendered = await make_chat_prompt(
            messages_api.chat_of(body), self.frontend.model, num_bytes=len(await request.body())
        )
        return Response(
            encode_json({"input_tokens": len(rendered.token_ids)}), media_type="application/json"
        )

    async def respond(self, request: Request) -> Response:
        """POST /v1/responses."""
        arrived_at = self.frontend.admit()
        body = await read_body(request, ResponsesRequest)
        store, client = self.frontend.responses, _client_name(request)
        if body.store and not store.max_bytes:
            raise InvalidRequest(
                "store: this gateway keeps no responses (--stored-responses-mib)", param="store"
            )
        items = [*store.before(body.previous_response_id, client), *body.items]

        def reply(job: Job) -> ReplyForm:
            keep = None
            if store.max_bytes and body.store is not False:
                keep = partial(store.put, job.id, client, items)
            return ResponsesReply(job, body, keep)

        with field_names(responses_api.FIELD_NAMES):
            return await self.frontend.answer(
                responses_api.chat_of(body, items), request, arrived_at, "responses", reply,
                default_max_tokens=body.max_output_tokens,
            )  # fmt: skip

    async def stored_response(self, request: Request, id_: str) -> Response:
        """GET and DELETE /v1/responses/{id}."""
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("stream: stored responses are told whole", param="stream")
        client = _client_name(request)
        if request.method == "DELETE":
            found = self.frontend.responses.delete(id_, client)
            content = encode_json({"id": id_, "object": "response", "deleted": True})
        else:
            stored = self.frontend.responses.get(id_, client)
            found, content = stored is not None, stored.response if stored else b""
        if not found:
            raise NotFound(f"Response with id {id_[:256]!r} not found.")
        return Response(content, media_type="application/json")


def _client_name(request: Request) -> str:
    name: str = request.scope[CLIENT].name
    return name
