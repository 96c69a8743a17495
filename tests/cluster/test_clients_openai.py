"""The openai SDK, unmodified, against a running cluster: sync, async, streams, parse, tools."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionToolParam
from pydantic import BaseModel, ConfigDict, Field

from tests.cluster.harness import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

QUESTION = "What is 37 + 48?"
WORKING = "\n37+48\n7+8=15 carry: 5\n3+4+1=8: 85\n=85\n"
ANSWER = "The answer is 85."


# A model as small as the demo's may write digits for ever where nothing bounds them.
Digit = Annotated[int, Field(ge=0, le=9)]


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")

    result: int = Field(ge=0, le=99_999)
    sign: Literal["+", "-"]
    digits: list[Digit] = Field(max_length=3)


class Place(BaseModel):
    name: Literal["Paris", "Zürich"]


class Trip(BaseModel):
    start: Place
    stops: list[Place] = Field(max_length=2)


class Weather(BaseModel):
    """Weather at a place."""

    place: Literal["Paris", "東京"]
    days: int = Field(ge=1, le=9)


ADD: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 999},
                "b": {"type": "integer", "minimum": 0, "maximum": 999},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(served: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture
async def async_client(served: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as one:
        yield one


def ask(client: openai.OpenAI, model: str) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(model=model, messages=messages, temperature=0)


def test_chat(client: openai.OpenAI, served: Cluster) -> None:
    reply = ask(client, served.model)
    (choice,) = reply.choices
    assert (choice.message.content or "").strip() == ANSWER
    assert choice.message.reasoning_content == WORKING  # type: ignore[attr-defined]
    assert choice.finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    thought = reply.usage.completion_tokens_details.reasoning_tokens
    assert thought is not None
    assert 20 < thought < reply.usage.completion_tokens
    assert reply._request_id
    assert reply.model == served.model


def test_chat_stream(client: openai.OpenAI, served: Cluster) -> None:
    stream = client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas).strip() == ANSWER
    thoughts = (getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert "".join(thoughts) == WORKING
    assert chunks[-2].choices[0].finish_reason == "stop"
    whole = ask(client, served.model)
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    entries = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    spelled = b"".join(bytes(entry.bytes or []) for entry in entries).decode()
    assert spelled.endswith(ANSWER)
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)


def test_stream_helper(client: openai.OpenAI, served: Cluster) -> None:
    with client.chat.completions.stream(
        model=served.model, messages=[{"role": "user", "content": QUESTION}], temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert (final.choices[0].message.content or "").strip() == ANSWER


def test_conversation(client: openai.OpenAI, served: Cluster) -> None:
    reply = client.chat.completions.create(
        model=served.model,
        messages=[
            {"role": "developer", "content": "Add."},
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": "What is 5 + 6?"},
        ],
        temperature=0,
        user="somebody",
        seed=1,
        n=2,
    )
    contents = [(choice.message.content or "").strip() for choice in reply.choices]
    assert contents == ["The answer is 11."] * 2


def test_parse(client: openai.OpenAI, served: Cluster) -> None:
    reply = client.chat.completions.parse(
        model=served.model,
        messages=[{"role": "user", "content": QUESTION}],
        response_format=Sum,
        temperature=0,
        max_tokens=300,
    )
    assert isinstance(reply.choices[0].message.parsed, Sum)
    content = reply.choices[0].message.content or ""
    assert content == json.dumps(json.loads(content), separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize("seed", range(5))
def test_parse_at_random(client: openai.OpenAI, served: Cluster, seed: int) -> None:
    for kind in (Sum, Trip):
        reply = client.chat.completions.parse(
            model=served.model,
            messages=[{"role": "user", "content": QUESTION}],
            response_format=kind,
            temperature=2,
            seed=seed,
            max_tokens=1000,
        )
        assert isinstance(reply.choices[0].message.parsed, kind)


def test_parse_stream(client: openai.OpenAI, served: Cluster) -> None:
    with client.chat.completions.stream(
        model=served.model,
        messages=[{"role": "user", "content": QUESTION}],
        response_format=Trip,
        temperature=0,
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Trip)


def test_parsed_tools(client: openai.OpenAI, served: Cluster) -> None:
    reply = client.chat.completions.parse(
        model=served.model,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1,
        seed=3,
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    (call,) = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_named_tool_and_its_result(client: openai.OpenAI, served: Cluster) -> None:
    asked = client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[ADD],
        tool_choice={"type": "function", "function": {"name": "add"}},
        temperature=0,
    )
    message = asked.choices[0].message
    (call,) = message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "add"
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    answered = client.chat.completions.create(
        model=served.model,
        messages=[
            {"role": "user", "content": QUESTION},
            message.model_dump(exclude_none=True),  # type: ignore[list-item]
            {"role": "tool", "tool_call_id": call.id, "content": "85"},
        ],
        tools=[ADD],
        temperature=0,
        max_tokens=50,
    )
    assert answered.choices[0].message.role == "assistant"


def test_tool_stream(client: openai.OpenAI, served: Cluster) -> None:
    with client.chat.completions.stream(
        model=served.model,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[ADD],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["add"]
    assert [set(json.loads(call.function.arguments)) for call in calls] == [{"a", "b"}]


def test_parallel_tools(client: openai.OpenAI, served: Cluster) -> None:
    """Left alone the demo model calls for ever: the last call is cut off."""
    reply = client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[ADD],
        tool_choice="required",
        temperature=1,
        seed=8,
        max_tokens=400,
    )
    calls = reply.choices[0].message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls) > 1
    for call in calls[:-1]:
        assert call.type == "function"
        assert set(json.loads(call.function.arguments)) == {"a", "b"}


def test_auto_tools_answer_in_words(client: openai.OpenAI, served: Cluster) -> None:
    reply = client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[ADD],
        tool_choice="none",
        temperature=0,
    )
    assert (reply.choices[0].message.content or "").strip() == ANSWER


def test_completions(client: openai.OpenAI, served: Cluster) -> None:
    reply = client.completions.create(
        model=served.model, prompt=["a b", "c d e"], max_tokens=3, echo=True, logprobs=1, n=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for choice in reply.choices:
        assert choice.logprobs is not None
        numbers = choice.logprobs.token_logprobs or []
        assert numbers[0] is None
        assert all(isinstance(number, float) for number in numbers[1:])
        # The token that begins every prompt is listed, but not shown.
        assert "".join((choice.logprobs.tokens or [])[1:]) == choice.text
    stream = client.completions.create(
        model=served.model, prompt=[5, 6, 7], max_tokens=5, stream=True, temperature=0
    )
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == served.complete([5, 6, 7], 5)["choices"][0]["text"]


def test_models(client: openai.OpenAI, served: Cluster) -> None:
    assert [model.id for model in client.models.list()] == [served.model]
    assert client.models.retrieve(served.model).id == served.model


def test_errors(client: openai.OpenAI, served: Cluster) -> None:
    with pytest.raises(openai.NotFoundError) as no_model:
        ask(client, "nothing")
    assert no_model.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=served.model, prompt=[5] * 5000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as schema:
        client.chat.completions.create(
            model=served.model,
            messages=[{"role": "user", "content": QUESTION}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"$ref": "#/$defs/nothing"}},
            },
        )
    assert schema.value.param
    assert schema.value.param.startswith("response_format")


async def test_async(async_client: openai.AsyncOpenAI, served: Cluster) -> None:
    reply = await async_client.chat.completions.create(
        model=served.model, messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    assert (reply.choices[0].message.content or "").strip() == ANSWER
    stream = await async_client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        stream=True,
    )
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(parts) == reply.choices[0].message.content


async def test_async_parse(async_client: openai.AsyncOpenAI, served: Cluster) -> None:
    reply = await async_client.chat.completions.parse(
        model=served.model,
        messages=[{"role": "user", "content": QUESTION}],
        response_format=Sum,
        temperature=1,
        seed=1,
    )
    assert isinstance(reply.choices[0].message.parsed, Sum)


async def test_leaving_a_stream(async_client: openai.AsyncOpenAI, served: Cluster) -> None:
    stream = await async_client.completions.create(
        model=served.model,
        prompt=[5, 6, 7],
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for _ in stream:
        break
    await stream.close()
    served.assert_nothing_held()
