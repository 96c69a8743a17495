"""The openai SDK's Responses API, unmodified: streams, tools, structured text, memory, errors."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from core.errors import Overloaded, Unavailable
from gateway.responses_api.input_items import ITEMS
from gateway.responses_api.response_store import ResponseStore
from tests.gateway.conftest import ANSWERS, MODEL, Gateway, running_gateway
from tests.gateway.fake_cluster import FakeCluster, Plan
from tests.gateway.model_folder import make_model_folder
from tests.larks import json_schema

pytestmark = pytest.mark.asyncio(loop_scope="module")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "description": "Of a city", "parameters": CITY}
TIME = {"type": "function", "name": "time", "parameters": CITY, "strict": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(
    shared_cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """With room for tools in the prompt."""
    folder = make_model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    async with running_gateway(shared_cluster, folder) as gateway:
        yield gateway


def sdk(gateway: Gateway, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with sdk(gateway) as client:
        yield client


async def ask(
    client: openai.AsyncOpenAI, said: Any, /, **fields: Any
) -> openai.types.responses.Response:
    fields = {"model": MODEL, "temperature": 0, "input": said} | fields
    response: openai.types.responses.Response = await client.responses.create(**fields)
    return response


def items(response: Any) -> list[dict[str, Any]]:
    """Without what differs from request to request."""
    dumped = [item.model_dump(exclude_none=True) for item in response.output]
    return [{n: v for n, v in item.items() if n not in ("id", "call_id")} for item in dumped]


async def test_text(client: openai.AsyncOpenAI) -> None:
    response = await ask(client, "unicode", instructions="Be brief", metadata={"a": "b"})
    assert response.output_text == ANSWERS["unicode"]
    assert response.status == "completed"
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.total_tokens > response.usage.input_tokens > 0
    assert response.usage.input_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    "name",
    [
        "unicode", "think", "one call", "two calls", "new calls", "empty", "text within",
        "no object",
    ],
)  # fmt: skip
@pytest.mark.parametrize("step_tokens", [1, 9])
async def test_a_stream_comes_to_the_whole_response(
    gateway: Gateway, client: openai.AsyncOpenAI, name: str, step_tokens: int
) -> None:
    gateway.cluster.first.plan.step_tokens = step_tokens
    tools = [WEATHER, TIME]
    whole = await ask(client, name, tools=tools)
    stream: Any = await ask(client, name, tools=tools, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert items(events[-1].response) == items(whole)
    assert events[-1].response.usage == whole.usage
    check_items(events[2:-1], events[-1].response.output)


def check_items(events: list[Any], output: list[Any]) -> None:
    """Each item is added, told and done before the next; deltas come to what is done."""
    done = []
    for event in events:
        assert event.output_index == len(done)
        kind = event.type.removeprefix("response.")
        if kind == "output_item.added":
            texts: list[str] = []
            assert event.item.status == "in_progress"
        elif kind.endswith(".delta"):
            texts.append(event.delta)
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event.text == "".join(texts)
        elif kind == "function_call_arguments.done":
            assert event.arguments == "".join(texts)
        elif kind == "output_item.done":
            done.append(event.item)
        else:
            assert kind in ("content_part.added", "content_part.done")
    assert done == output


async def test_thoughts_are_items(client: openai.AsyncOpenAI) -> None:
    response = await ask(client, "think", reasoning={"summary": "auto"})
    thoughts, message = response.output
    assert thoughts.type == "reasoning"
    assert thoughts.content is not None
    assert thoughts.content[0].text == "one and one"
    assert message.type == "message"
    assert response.output_text == "two"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0


async def test_the_sdk_puts_streams_together(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model=MODEL, input="think", temperature=0) as stream:
        async for _ in stream:
            pass
        response = await stream.get_final_response()
    assert response.output_text == "two"


async def test_a_loop_of_tools(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    """The same prompt by items sent back, by `previous_response_id`, and as a chat."""
    first = await ask(client, "one call", tools=[WEATHER, TIME])
    calls = [item for item in first.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["weather"]
    assert json.loads(calls[0].arguments) == {"city": "Zürich {x}"}
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls
    ]
    again = [item.model_dump(exclude_none=True) for item in first.output]
    await ask(
        client, [{"role": "user", "content": "one call"}, *again, *results], tools=[WEATHER, TIME]
    )
    await ask(client, results, previous_response_id=first.id, tools=[WEATHER, TIME])
    chat: list[Any] = [
        {"role": "user", "content": "one call"},
        {"role": "assistant", "content": "I look.", "tool_calls": [
            {"id": call.call_id, "type": "function",
             "function": {"name": call.name, "arguments": call.arguments}} for call in calls
        ]},
        *({"role": "tool", "tool_call_id": call.call_id, "content": "sun"} for call in calls),
    ]  # fmt: skip
    tools = [
        {"type": "function", "function": {n: v for n, v in tool.items() if n != "type"}}
        for tool in (WEATHER, TIME)
    ]
    await gateway.post("/v1/chat/completions", messages=chat, tools=tools)
    _, *others = gateway.cluster.first.requests
    assert len({request.prompt_token_ids for request in others}) == 1


async def test_conversations_are_kept(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    first = await ask(client, "plain", instructions="First only")
    second = await ask(client, "more", previous_response_id=first.id)
    third = await ask(client, "last", previous_response_id=second.id)
    told = await client.responses.retrieve(third.id)
    assert (told.output_text, told.id) == (third.output_text, third.id)
    await gateway.post("/v1/chat/completions", messages=[
        {"role": "user", "content": "plain"}, {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"}, {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "last"},
    ])  # fmt: skip
    *_, of_third, of_chat = gateway.cluster.first.requests
    assert of_third.prompt_token_ids == of_chat.prompt_token_ids
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError) as gone:
        await ask(client, "x", previous_response_id=second.id)
    assert gone.value.code == "previous_response_not_found"
    assert gone.value.param == "previous_response_id"
    stream: Any = await ask(client, "plain", stream=True)
    ended = [event async for event in stream][-1].response
    assert (await client.responses.retrieve(ended.id)).output == ended.output
    secret = await ask(client, "plain", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(secret.id)


async def test_memory_is_of_the_key_and_can_be_none(gateway: Gateway, model_folder: Path) -> None:
    async with (
        running_gateway(gateway.cluster, model_folder, api_keys="a,b") as guarded,
        sdk(guarded, "a") as one,
        sdk(guarded, "b") as other,
    ):
        mine = await ask(one, "plain")
        assert (await one.responses.retrieve(mine.id)).id == mine.id
        for refused in (other.responses.retrieve(mine.id), other.responses.delete(mine.id)):
            with pytest.raises(openai.NotFoundError):
                await refused
    async with (
        running_gateway(gateway.cluster, model_folder, stored_responses_mib=0) as forgetful,
        sdk(forgetful) as client,
    ):
        response = await ask(client, "plain")
        assert response.model_dump()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="store"):
            await ask(client, "plain", store=True)


async def test_memory_is_bounded_and_shared(tmp_path: Path) -> None:
    path = tmp_path / "responses"
    one, other = ResponseStore(path, 1000), ResponseStore(path, 1000)
    said = ITEMS.validate_python([{"role": "user", "content": "x" * 100}])
    for number in range(20):
        (one, other)[number % 2].put(f"resp_{number}", "me", said, b"{}", [])
    kept = [number for number in range(20) if one.get(f"resp_{number}", "me")]
    assert kept == list(range(20 - len(kept), 20))
    assert 2 < len(kept) < 10
    one.put("resp_large", "me", said, b"x" * 1001, [])
    assert other.get("resp_large", "me") is None
    assert other.before("resp_19", "me") == said
    assert path.stat().st_mode & 0o077 == 0
    one.close()
    other.close()


class Place(BaseModel):
    name: str


async def test_structured_text(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(ValueError):  # the fakes keep to no schema, the SDK does
        await client.responses.parse(model=MODEL, input="plain", text_format=Place)
    await ask(client, "plain", text={"format": {"type": "json_object"}, "verbosity": "low"})
    first, second = gateway.cluster.first.requests
    schema = {**Place.model_json_schema(), "additionalProperties": False}
    assert first.sampling.grammar.lark == json_schema(json.dumps(schema))
    assert second.sampling.grammar.lark == json_schema("")


async def test_cut_off(client: openai.AsyncOpenAI) -> None:
    response = await ask(client, "plain", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    stream: Any = await ask(client, "plain", max_output_tokens=3, stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.incomplete"
    assert items(last.response) == items(response)


@pytest.mark.parametrize(
    ("choice", "calls"),
    [("required", 2), ({"type": "function", "name": "weather"}, 1), ("none", 0)],
)
async def test_tool_choice(
    gateway: Gateway, client: openai.AsyncOpenAI, choice: Any, calls: int
) -> None:
    response = await ask(client, "two calls", tools=[WEATHER, TIME], tool_choice=choice)
    (request,) = gateway.cluster.first.requests
    assert request.sampling.HasField("grammar") == (calls > 0)
    assert [item.type for item in response.output].count("function_call") == calls
    assert response.model_dump()["tool_choice"] == choice


IMAGE = {"type": "input_image", "image_url": "data:,", "detail": "auto"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{**WEATHER, "parameters": {"type": "string"}}], "tool_choice": "required"},
     "tools[0].parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "no"}}}},
     "text.format.schema"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    # As in a chat: this model's template has no levels.
    ({"reasoning": {"effort": "medium"}}, "reasoning.effort"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "blamed"), BAD)
async def test_bad_requests(
    client: openai.AsyncOpenAI, fields: dict[str, Any], blamed: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await ask(client, "plain", **fields)
    param = raised.value.param
    assert param is not None
    assert param.startswith(blamed)
    assert param in raised.value.message


async def test_errors_are_the_sdks(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await ask(client, "plain", model="other")
    gateway.cluster.router.errors.append(Overloaded("full"))
    with pytest.raises(openai.RateLimitError):
        await ask(client, "plain")


async def test_a_stream_that_fails_says_so(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    cluster = gateway.cluster
    for decode in (cluster.first, cluster.second):
        decode.plan = Plan(fail_after=2, error=Unavailable("lost it"))
    cluster.first.plan.step_seconds = 0.05
    stream: Any = await ask(client, "plain", stream=True)
    cluster.router.down = {cluster.first.epoch, cluster.second.epoch}
    last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert last.response.error.code == "server_error"
    assert "no pair of workers" in last.response.error.message


async def test_a_stream_goes_on_after_a_worker_died(
    gateway: Gateway, client: openai.AsyncOpenAI
) -> None:
    gateway.cluster.first.plan = Plan(fail_after=3, error=Unavailable("lost it"))
    stream: Any = await ask(client, "think", stream=True)
    events = [event async for event in stream]
    assert events[-1].response.output_text == "two"
    assert len(gateway.cluster.second.requests) == 1


async def test_closing_a_stream_aborts_it(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    decode = gateway.cluster.first
    decode.plan.hang_after = 3
    stream: Any = await ask(client, "plain", stream=True)
    async for _ in stream:
        break
    await stream.close()
    await asyncio.wait_for(decode.cancelled.wait(), 20)
