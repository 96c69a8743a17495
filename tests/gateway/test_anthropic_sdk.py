"""The anthropic SDK, unmodified, against /v1/messages: streams, tools, thoughts, errors, counts."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic.types import MessageParam, ToolParam
from pydantic import BaseModel

from core.errors import Overloaded, Unavailable
from tests.gateway.conftest import ANSWERS, MODEL, Gateway, running_gateway
from tests.gateway.fake_cluster import FakeCluster, Plan
from tests.gateway.model_folder import make_model_folder
from tests.larks import json_schema

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEATHER: ToolParam = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
GREEDY = {"temperature": 0}  # the SDK knows it no more, older ones do


MAX_POSITION = 2048


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(
    shared_cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """With room for tools in the prompt."""
    folder = make_model_folder(
        tmp_path_factory.mktemp("model"), max_position_embeddings=MAX_POSITION
    )
    async with running_gateway(shared_cluster, folder) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: Gateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=gateway.url, api_key="none", max_retries=0
    ) as client:
        yield client


def user(text: str) -> MessageParam:
    return {"role": "user", "content": text}


async def ask(
    client: anthropic.AsyncAnthropic, text: str, **fields: Any
) -> anthropic.types.Message:
    fields = {"model": MODEL, "max_tokens": 200, "messages": [user(text)]} | fields
    message: anthropic.types.Message = await client.messages.create(**fields, extra_body=GREEDY)
    return message


async def streamed(
    client: anthropic.AsyncAnthropic, text: str, **fields: Any
) -> tuple[list[str], Any]:
    """Kinds of the events, and what the SDK puts together from them."""
    async with client.messages.stream(
        model=MODEL, max_tokens=200, messages=[user(text)], extra_body=GREEDY, **fields
    ) as stream:
        kinds = [event.type async for event in stream]
        return kinds, await stream.get_final_message()


def parts(message: Any) -> list[dict[str, Any]]:
    """Blocks without what differs from request to request."""
    dumped = [block.model_dump(exclude_none=True) for block in message.content]
    return [
        {name: value for name, value in block.items() if name not in ("id", "signature")}
        for block in dumped
    ]


async def test_text(client: anthropic.AsyncAnthropic) -> None:
    message = await ask(client, "unicode")
    assert parts(message) == [{"type": "text", "text": ANSWERS["unicode"]}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens > 0
    assert message._request_id


@pytest.mark.parametrize(
    "name",
    [
        "unicode", "think", "one call", "two calls", "new calls", "empty", "text within",
        "no object",
    ],
)  # fmt: skip
@pytest.mark.parametrize("step_tokens", [1, 9])
async def test_a_stream_comes_to_the_whole_message(
    gateway: Gateway, client: anthropic.AsyncAnthropic, name: str, step_tokens: int
) -> None:
    gateway.cluster.first.plan.step_tokens = step_tokens
    tools = [WEATHER, {**WEATHER, "name": "time"}]
    whole = await ask(client, name, tools=tools)
    kinds, message = await streamed(client, name, tools=tools)
    assert parts(message) == parts(whole)
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    assert kinds.count("content_block_stop") == len(whole.content)


async def test_blocks_are_in_the_models_order(client: anthropic.AsyncAnthropic) -> None:
    message = await ask(client, "text within", tools=[WEATHER], max_tokens=400)
    assert parts(message) == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Bern"}},
        {"type": "text", "text": "Or so."},
        {"type": "tool_use", "name": "time", "input": {}},
        {"type": "text", "text": " End"},
    ]


async def test_arguments_that_are_no_object(client: anthropic.AsyncAnthropic) -> None:
    (block,) = parts(await ask(client, "no object", tools=[WEATHER]))
    assert block["input"] == {"arguments": '["Zürich \\"\n", 1]'}


async def test_thoughts(client: anthropic.AsyncAnthropic) -> None:
    message = await ask(client, "think")
    assert parts(message) == [
        {"type": "thinking", "thinking": "one and one"},
        {"type": "text", "text": "two"},
    ]
    assert message.content[0].signature  # type: ignore[union-attr]
    details = message.usage.output_tokens_details
    assert details is not None
    assert details.thinking_tokens > 0
    shown = await ask(client, "think", thinking={"type": "adaptive", "display": "omitted"})
    assert parts(shown) == [{"type": "text", "text": "two"}]


async def test_a_loop_of_tools(gateway: Gateway, client: anthropic.AsyncAnthropic) -> None:
    first = await ask(client, "one call", tools=[WEATHER])
    assert first.stop_reason == "tool_use"
    text, call = first.content
    assert text.text == "I look."  # type: ignore[union-attr]
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("weather", {"city": "Zürich {x}"})
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "sun"}],
    }
    history = [user("one call"), first.to_param(), {"role": "user", "content": [result]}]
    await ask(client, "", tools=[WEATHER], messages=history)
    requests = gateway.cluster.first.requests
    assert len(requests) == 2


async def test_the_prompt_is_that_of_the_same_chat(
    gateway: Gateway, client: anthropic.AsyncAnthropic
) -> None:
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]
    messages = [
        user("a"), user("b"),
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "c"},
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "d", "cache_control": {"type": "ephemeral"}},
        ]},
    ]  # fmt: skip
    await ask(client, "", system=system, messages=messages)
    chat = [
        {"role": "system", "content": "Be\nbrief"}, {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"},
    ]  # fmt: skip
    await gateway.post("/v1/chat/completions", messages=chat)
    first, second = gateway.cluster.first.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    count = await client.messages.count_tokens(model=MODEL, system=system, messages=messages)  # type: ignore[arg-type]
    assert count.input_tokens == len(first.prompt_token_ids) // 4


async def test_a_last_message_of_the_assistant_is_continued(
    gateway: Gateway, client: anthropic.AsyncAnthropic
) -> None:
    prefix = {"role": "assistant", "content": "The ca"}
    await ask(client, "", messages=[user("plain"), prefix])
    await gateway.post("/v1/chat/completions", messages=[user("plain"), {**prefix, "prefix": True}])
    first, second = gateway.cluster.first.requests
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_ends(client: anthropic.AsyncAnthropic) -> None:
    stopped = await ask(client, "plain", stop_sequences=["zzz", "dog"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "dog")
    _, told = await streamed(client, "plain", stop_sequences=["dog"])
    assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", "dog")
    cut = await ask(client, "plain", max_tokens=3)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    long = user("long" + "." * (MAX_POSITION - 60))
    full = await ask(client, "", messages=[long], max_tokens=8000)
    assert full.stop_reason == "model_context_window_exceeded"


async def test_a_call_that_is_cut_off_has_what_there_is(client: anthropic.AsyncAnthropic) -> None:
    whole = await ask(client, "one call", tools=[WEATHER])
    cut = await ask(client, "one call", tools=[WEATHER], max_tokens=whole.usage.output_tokens - 60)
    call = cut.content[-1]
    assert call.type == "tool_use"
    assert "Zürich {x}".startswith(str(call.input.get("city", "")))


@pytest.mark.parametrize(
    ("choice", "forces"),
    [({"type": "any"}, True), ({"type": "tool", "name": "weather"}, True),
     ({"type": "auto", "disable_parallel_tool_use": True}, False), ({"type": "none"}, False)],
)  # fmt: skip
async def test_tool_choice(
    gateway: Gateway, client: anthropic.AsyncAnthropic, choice: dict[str, Any], forces: bool
) -> None:
    message = await ask(client, "two calls", tools=[WEATHER], tool_choice=choice, max_tokens=400)
    (request,) = gateway.cluster.first.requests
    assert request.sampling.HasField("grammar") == forces
    calls = [block for block in message.content if block.type == "tool_use"]
    assert len(calls) == {"any": 2, "tool": 1, "auto": 1, "none": 0}[choice["type"]]


class Place(BaseModel):
    name: str


async def test_structured_text(gateway: Gateway, client: anthropic.AsyncAnthropic) -> None:
    schema = {**Place.model_json_schema(), "additionalProperties": False}
    await ask(client, "plain", output_config={"format": {"type": "json_schema", "schema": schema}})
    (request,) = gateway.cluster.first.requests
    assert request.sampling.grammar.lark == json_schema(json.dumps(schema))


async def test_what_a_coding_agent_sends(gateway: Gateway) -> None:
    """Claude Code's, as it was seen."""
    body = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "one call", "cache_control": {"type": "ephemeral"}},
            ]},
            {"role": "system", "content": "Available agent types"},
        ],
        "system": [{"type": "text", "text": "An agent", "cache_control": {"type": "ephemeral"}}],
        "tools": [WEATHER],
        "metadata": {"user_id": "{}"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        "temperature": 0,
    }  # fmt: skip
    reply = await gateway.client.post("/v1/messages?beta=true", json=body)
    assert '"stop_reason":"tool_use"' in reply.text


async def test_sampling_fields_reach_the_worker(gateway: Gateway) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": [user("plain")]}
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "metadata": {"user_id": "me"}}
    reply = await gateway.client.post("/v1/messages", json=body | fields)
    assert reply.status_code == 200
    (request,) = gateway.cluster.first.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
BAD = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages\\[0\\].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages\\[0\\]"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1000}}, "thinking.budget_tokens"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools\\[0\\]"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"container": "one"}, "container"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edits"),
    ({"temperature": 1.5}, "temperature"),
]


@pytest.mark.parametrize(("fields", "blamed"), BAD)
async def test_bad_requests(
    client: anthropic.AsyncAnthropic, fields: dict[str, Any], blamed: str
) -> None:
    body = {"model": MODEL, "max_tokens": 200, "messages": [user("plain")]} | fields
    known = {name: value for name, value in body.items() if value is not None}
    with pytest.raises(anthropic.BadRequestError, match=blamed) as raised:
        await client.post("/v1/messages", cast_to=object, body=known)
    assert raised.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert raised.value.body["request_id"] == raised.value.request_id  # type: ignore[index]


async def test_errors_are_the_sdks(gateway: Gateway, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="other"):
        await ask(client, "plain", model="other")
    gateway.cluster.router.errors.append(Overloaded("full"))
    with pytest.raises(anthropic.RateLimitError, match="full"):
        await ask(client, "plain")
    gateway.cluster.router.errors.extend([Unavailable("nobody")] * 50)
    with pytest.raises(anthropic.InternalServerError, match="overloaded_error"):
        await ask(client, "plain")
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        await client.post("/v1/messages/batches", cast_to=object, body={})


async def test_keys(gateway: Gateway, model_folder: Path) -> None:
    async with running_gateway(gateway.cluster, model_folder, api_keys="secret") as guarded:
        for key in ({"api_key": "secret"}, {"auth_token": "secret"}):
            async with anthropic.AsyncAnthropic(base_url=guarded.url, **key) as client:
                assert (await ask(client, "plain")).stop_reason == "end_turn"
        async with anthropic.AsyncAnthropic(base_url=guarded.url, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
                await ask(client, "plain")


async def test_silence_is_filled_with_pings(gateway: Gateway, model_folder: Path) -> None:
    gateway.cluster.first.plan.hang_after = 2
    body = {"model": MODEL, "max_tokens": 99, "messages": [user("plain")], "stream": True}
    async with (
        running_gateway(gateway.cluster, model_folder, ping_seconds=0.05) as pinging,
        pinging.client.stream("POST", "/v1/messages", json=body) as reply,
    ):
        lines = reply.aiter_lines()
        async for line in lines:
            if line == "event: ping":
                assert json.loads((await anext(lines)).removeprefix("data: ")) == {"type": "ping"}
                return
    pytest.fail("no ping")


async def test_an_error_in_mid_stream_is_raised(
    gateway: Gateway, client: anthropic.AsyncAnthropic
) -> None:
    cluster = gateway.cluster
    for decode in (cluster.first, cluster.second):
        decode.plan = Plan(fail_after=2, error=Unavailable("lost it"))
    cluster.first.plan.step_seconds = 0.05
    async with client.messages.stream(
        model=MODEL, max_tokens=99, messages=[user("plain")]
    ) as stream:
        cluster.router.down = {cluster.first.epoch, cluster.second.epoch}
        with pytest.raises(anthropic.APIStatusError, match="no pair of workers"):
            async for _ in stream:
                pass


async def test_closing_a_stream_aborts_it(
    gateway: Gateway, client: anthropic.AsyncAnthropic
) -> None:
    decode = gateway.cluster.first
    decode.plan.hang_after = 3
    async with client.messages.stream(
        model=MODEL, max_tokens=99, messages=[user("plain")]
    ) as stream:
        async for _ in stream:
            break
    await asyncio.wait_for(decode.cancelled.wait(), 20)
