"""litellm and langchain-openai, unmodified, against a running cluster."""

import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import pytest
from pydantic import BaseModel, Field

from tests.cluster.harness import Cluster

if TYPE_CHECKING:  # importing it warns
    from langchain_openai import ChatOpenAI

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    # Both warn of what the libraries below them deprecate.
    pytest.mark.filterwarnings("ignore"),
]

QUESTION = "What is 37 + 48?"
ANSWER = "The answer is 85."
MESSAGES = [{"role": "user", "content": QUESTION}]


class Sum(BaseModel):
    """A sum."""

    result: int = Field(ge=0, le=99_999)
    sign: Literal["+", "-"]


TOOL = {
    "type": "function",
    "function": {"name": "Sum", "description": "A sum", "parameters": Sum.model_json_schema()},
}


@pytest.fixture(scope="module")
def litellm() -> Iterator[ModuleType]:
    # Otherwise it asks the network for prices.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("litellm")


@pytest.fixture
def where(served: Cluster) -> dict[str, str]:
    model = f"openai/{served.model}"
    return {"model": model, "api_base": f"{served.url}/v1", "api_key": "none"}


def test_litellm(litellm: ModuleType, where: dict[str, str]) -> None:
    reply = litellm.completion(**where, messages=MESSAGES, temperature=0)
    message = reply.choices[0].message
    assert message.content.strip() == ANSWER
    assert "37+48" in message.reasoning_content
    assert reply.usage.completion_tokens > 20
    stream = litellm.completion(
        **where,
        messages=MESSAGES,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts).strip() == ANSWER
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content.strip() == ANSWER


async def test_litellm_async(litellm: ModuleType, where: dict[str, str]) -> None:
    reply = await litellm.acompletion(**where, messages=MESSAGES, temperature=0)
    assert reply.choices[0].message.content.strip() == ANSWER


def test_litellm_schema_and_tools(litellm: ModuleType, where: dict[str, str]) -> None:
    reply = litellm.completion(**where, messages=MESSAGES, response_format=Sum, temperature=0)
    Sum.model_validate_json(reply.choices[0].message.content)
    reply = litellm.completion(
        **where,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,  # as many as it may, otherwise, and that takes its time
        temperature=0,
    )
    call = reply.choices[0].message.tool_calls[0]
    assert call.function.name == "Sum"
    Sum.model_validate_json(call.function.arguments)


def test_litellm_text_completion(litellm: ModuleType, where: dict[str, str]) -> None:
    model = {**where, "model": where["model"].replace("openai/", "text-completion-openai/")}
    reply = litellm.text_completion(**model, prompt="What is", max_tokens=4, temperature=0)
    assert reply.choices[0].text


def test_litellm_knows_the_errors(litellm: ModuleType, where: dict[str, str]) -> None:
    long = [{"role": "user", "content": "1 " * 5000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**where, messages=long)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**(where | {"model": "openai/nothing"}), messages=MESSAGES)


@pytest.fixture
def chat(served: Cluster) -> "ChatOpenAI":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import langchain_openai

    return langchain_openai.ChatOpenAI(
        model=served.model,
        base_url=f"{served.url}/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
    )


def test_langchain(chat: "ChatOpenAI") -> None:
    reply = chat.invoke([("system", "Add."), ("human", QUESTION)])
    assert reply.content.strip() == ANSWER
    assert reply.usage_metadata["output_tokens"] > 20
    assert reply.response_metadata["finish_reason"] == "stop"
    parts = [part.content for part in chat.stream([("system", "Add."), ("human", QUESTION)])]
    assert "".join(parts) == reply.content
    replies = chat.batch(["What is 1 + 2?", "What is 3 + 4?"])
    assert [one.content.strip() for one in replies] == ["The answer is 3.", "The answer is 7."]


async def test_langchain_async(chat: "ChatOpenAI") -> None:
    assert (await chat.ainvoke(QUESTION)).content.strip() == ANSWER
    parts = [part.content async for part in chat.astream(QUESTION)]
    assert "".join(parts).strip() == ANSWER


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chat: "ChatOpenAI", method: str) -> None:
    asked = chat.with_structured_output(Sum, method=method)
    assert isinstance(asked.invoke(QUESTION), Sum)


def test_langchain_tools(chat: "ChatOpenAI") -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = chat.bind_tools([Sum], tool_choice="Sum")
    reply = bound.invoke(QUESTION)
    (call,) = reply.tool_calls
    Sum.model_validate(call["args"])
    result = ToolMessage(content="85", tool_call_id=call["id"])
    answer = chat.bind(max_tokens=40).invoke([HumanMessage(QUESTION), reply, result])
    assert isinstance(answer.content, str)
    whole = None
    for part in bound.stream(QUESTION):
        whole = part if whole is None else whole + part
    assert whole is not None
    assert whole.tool_calls[0]["args"] == call["args"]
