"""The anthropic SDK and the openai SDK's Responses API, unmodified, against a running cluster."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.cluster.harness import Cluster
from tests.cluster.test_clients_openai import ADD, ANSWER, QUESTION, WORKING

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

FUNCTION: Any = ADD["function"]


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")

    result: int = Field(ge=0, le=99_999)


@pytest.fixture(scope="module")
def claude(served: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(served: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def question(model: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    greedy = {"temperature": 0}
    return {"model": model, "max_tokens": 200, "messages": messages, "extra_body": greedy}


def test_messages(claude: anthropic.Anthropic, served: Cluster) -> None:
    whole = claude.messages.create(**question(served.model))
    with claude.messages.stream(**question(served.model)) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thoughts, text = message.content
        assert thoughts.thinking == WORKING  # type: ignore[union-attr]
        assert text.text.strip() == ANSWER  # type: ignore[union-attr]
        assert message.stop_reason == "end_turn"
    count = claude.messages.count_tokens(
        model=served.model, messages=[{"role": "user", "content": QUESTION}]
    )
    usage = streamed.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_messages_with_a_forced_tool(claude: anthropic.Anthropic, served: Cluster) -> None:
    tool: Any = {"name": "add", "input_schema": FUNCTION["parameters"]}
    forced: Any = {"type": "tool", "name": "add"}
    asked = question(served.model)
    message = claude.messages.create(**asked, tools=[tool], tool_choice=forced)
    call = message.content[-1]
    assert call.type == "tool_use"
    assert set(call.input) == {"a", "b"}
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "85"}
    asked["messages"] += [message.to_param(), {"role": "user", "content": [result]}]
    assert claude.messages.create(**asked, tools=[tool]).usage.output_tokens > 0


def test_responses(client: openai.OpenAI, served: Cluster) -> None:
    whole = client.responses.create(model=served.model, input=QUESTION, temperature=0)
    with client.responses.stream(model=served.model, input=QUESTION, temperature=0) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    for response in (whole, streamed):
        assert response.output_text.strip() == ANSWER
        assert [item.type for item in response.output] == ["reasoning", "message"]
    again = client.responses.create(
        model=served.model, input=QUESTION, previous_response_id=whole.id, max_output_tokens=4
    )
    assert whole.usage is not None
    assert again.usage is not None
    assert again.usage.input_tokens > whole.usage.input_tokens
    assert again.status == "incomplete"


def test_responses_keep_to_a_schema_and_call_tools(client: openai.OpenAI, served: Cluster) -> None:
    parsed = client.responses.parse(
        model=served.model, input=QUESTION, text_format=Sum, temperature=0
    )
    assert isinstance(parsed.output_parsed, Sum)
    response = client.responses.create(
        model=served.model,
        input=QUESTION,
        tools=[{"type": "function", "strict": True, **FUNCTION}],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert set(json.loads(call.arguments)) == {"a", "b"}
