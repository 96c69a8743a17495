"""Thoughts, tools, grammars and echo on a real cluster."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.cluster.harness import Cluster

pytestmark = pytest.mark.cluster

SCHEMA = {
    "$defs": {"Digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    "type": "object",
    "properties": {
        "kind": {"enum": ["sum", "product"]},
        "digits": {"type": "array", "items": {"$ref": "#/$defs/Digit"}, "maxItems": 3},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["kind", "digits", "note"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def cluster(served: Cluster) -> Iterator[Cluster]:
    yield served
    served.assert_nothing_held()


def post(cluster: Cluster, path: str, **fields: Any) -> httpx.Response:
    body = {"model": cluster.model, "temperature": 0, "max_tokens": 200} | fields
    reply = cluster.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply


def chat(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    (choice,) = post(cluster, "/v1/chat/completions", messages=QUESTION, **fields).json()["choices"]
    assert isinstance(choice, dict)
    return choice


def test_thoughts(cluster: Cluster) -> None:
    whole = chat(cluster)["message"]
    assert "42" in whole["reasoning_content"]
    assert whole["content"].strip() == "The answer is 42."
    stream = post(cluster, "/v1/chat/completions", messages=QUESTION, stream=True).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == whole[name]


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_schema_is_kept_to(cluster: Cluster, seed: int, temperature: float) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    choice = chat(cluster, response_format=wrapped, seed=seed, temperature=temperature)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_guided_forms(cluster: Cluster) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"guided_choice": ["yes", "no way"]}, "yes|no way"),
        ({"guided_grammar": 'root ::= "a" [bc] "!"'}, "a[bc]!"),
    ]
    for fields, pattern in forms:
        choice = chat(cluster, temperature=1.5, seed=3, **fields)
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["message"]["content"])


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=["any", "add"]
)
def test_calls_are_forced(cluster: Cluster, choice: Any) -> None:
    told = chat(cluster, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=400)
    assert told["finish_reason"] == "tool_calls"
    (call,) = told["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "add":
        jsonschema.validate(arguments, SCHEMA)
    else:
        assert (call["function"]["name"], arguments) == ("now", {})
    result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    messages = [*QUESTION, told["message"], result]
    post(cluster, "/v1/chat/completions", messages=messages, tools=TOOLS, max_tokens=4)


def test_echo_scores_what_was_generated(cluster: Cluster) -> None:
    """As evaluation harnesses ask: the prompt's log-probabilities are those with which the same
    tokens would be generated."""
    prompt = cluster.client.post("/tokenize", json={"messages": QUESTION}).json()["tokens"]
    made = post(cluster, "/v1/completions", prompt=prompt, max_tokens=12, logprobs=0).json()
    logprobs = made["choices"][0]["logprobs"]
    text = "".join(logprobs["tokens"])
    ids = cluster.client.post(
        "/tokenize", json={"prompt": text, "add_special_tokens": False}
    ).json()["tokens"]
    assert len(ids) == 12
    scored = post(
        cluster, "/v1/completions", prompt=[*prompt, *ids], max_tokens=0, echo=True, logprobs=1
    ).json()["choices"][0]
    assert scored["logprobs"]["token_logprobs"][0] is None
    assert scored["logprobs"]["token_logprobs"][-12:] == pytest.approx(
        logprobs["token_logprobs"], abs=1e-3
    )
    assert scored["finish_reason"] == "length"


def test_what_does_not_compile_is_refused_at_once(cluster: Cluster) -> None:
    for fields in ({"guided_regex": "a("}, {"guided_json": {"$ref": "#/$defs/none"}}):
        body = {"model": cluster.model, "messages": QUESTION} | fields
        reply = cluster.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == next(iter(fields))
