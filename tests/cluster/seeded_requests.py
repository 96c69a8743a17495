"""Requests that use every parameter of the API, one and several at a time; the same for a seed."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]
Parameter = Callable[[random.Random], Fields]

WEATHER: Fields = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "enum": ["Paris", "Zürich", "東京"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
ADD: Fields = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 9999},
                "b": {"type": "integer", "minimum": 0, "maximum": 9999},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
SCHEMA: Fields = {
    "type": "object",
    "properties": {
        "result": {"type": "integer", "minimum": 0, "maximum": 9999},
        "sign": {"enum": ["+", "-", "é"]},
        "steps": {"type": "array", "items": {"$ref": "#/$defs/digit"}, "maxItems": 3},
    },
    "required": ["result", "sign", "steps"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
BAD_SCHEMA: Fields = {"type": "object", "properties": {"a": {"$ref": "#/$defs/nothing"}}}
SUM_GRAMMAR = 'root ::= digits " + " digits\ndigits ::= [1-9] [0-9]?\n'


@dataclass(frozen=True)
class SeededRequest:
    """`streamable`: OpenAI's API knows it with `stream` as well. `status` is the right one."""

    path: str
    body: Fields
    streamable: bool
    status: int


def _json_schema(schema: Fields) -> Fields:
    wrapped = {"name": "sum", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wrapped}}


def _biases(rng: random.Random) -> Fields:
    biases = {str(rng.randrange(7, 768)): rng.choice((-100, -3.5, 2, 4)) for _ in range(4)}
    return {"logit_bias": biases}


COMMON: dict[str, Parameter] = {
    "temperature": lambda rng: {"temperature": rng.choice((0, 0.3, 0.7, 1.0, 2.0))},
    "top_p": lambda rng: {"temperature": 1.0, "top_p": rng.choice((0.01, 0.5, 0.9))},
    "top_k": lambda rng: {"temperature": 1.0, "top_k": rng.choice((-1, 1, 5, 40))},
    "min_p": lambda rng: {"temperature": 1.0, "min_p": rng.choice((0.02, 0.2))},
    "seed": lambda rng: {"temperature": 1.0, "seed": rng.choice((-7, 0, 2**63))},
    "frequency_penalty": lambda rng: {"frequency_penalty": rng.choice((-0.5, 0.3, 2))},
    "presence_penalty": lambda rng: {"presence_penalty": rng.choice((-0.5, 0.3, 2))},
    "repetition_penalty": lambda rng: {"repetition_penalty": rng.choice((0.9, 1.1, 1.5))},
    "logit_bias": _biases,
    "stop": lambda rng: {"stop": rng.choice(("=", "\n", ["carry", "The answer"], [":", "</th"]))},
    "stop_token_ids": lambda rng: {"stop_token_ids": [rng.randrange(7, 768) for _ in range(20)]},
    "max_tokens": lambda rng: {"max_tokens": rng.choice((1, 2, 7, 30))},
    "min_tokens": lambda rng: {"min_tokens": rng.choice((1, 12)), "stop": ["=", "The"]},
    "ignore_eos": lambda rng: {"ignore_eos": True, "max_tokens": 24},
    "n": lambda rng: {"n": rng.choice((2, 3)), "temperature": 1.0},
    "priority": lambda rng: {"priority": rng.choice((-5, 9))},
    "user": lambda rng: {"user": "somebody", "service_tier": "auto", "store": False},
    "guided_regex": lambda rng: {"guided_regex": r"(yes|no): [0-9]{1,4}(\.[0-9]{2})?"},
    "guided_grammar": lambda rng: {"guided_grammar": SUM_GRAMMAR},
    "guided_choice": lambda rng: {"guided_choice": ["north", "nördlich", "south", "7"]},
    "guided_json": lambda rng: {"guided_json": SCHEMA},
    "json_object": lambda rng: {"response_format": {"type": "json_object"}, "max_tokens": 24},
    "json_schema": lambda rng: _json_schema(SCHEMA),
    "bad_schema": lambda rng: _json_schema(BAD_SCHEMA),
    "text": lambda rng: {"response_format": {"type": "text"}},
}
CHAT: dict[str, Parameter] = COMMON | {
    "max_completion_tokens": lambda rng: {"max_completion_tokens": rng.choice((1, 9, 40))},
    "logprobs": lambda rng: {"logprobs": True},
    "top_logprobs": lambda rng: {"logprobs": True, "top_logprobs": rng.choice((0, 1, 20))},
    "include_reasoning": lambda rng: {"include_reasoning": rng.random() < 0.3},
    "tools": lambda rng: {"tools": [WEATHER, ADD], "tool_choice": rng.choice(("auto", "none"))},
    "required": lambda rng: {
        "tools": [WEATHER, ADD], "tool_choice": "required", "parallel_tool_calls": False,
    },
    "named": lambda rng: {
        "tools": [WEATHER, ADD], "tool_choice": {"type": "function", "function": {"name": "add"}},
    },
    "chat_template_kwargs": lambda rng: {"chat_template_kwargs": {"thinking": True}},
    "no_turn": lambda rng: {"add_generation_prompt": False},
    "continued": lambda rng: {"continue_final_message": True, "add_generation_prompt": False},
}  # fmt: skip
COMPLETION: dict[str, Parameter] = COMMON | {
    "logprobs": lambda rng: {"logprobs": rng.choice((0, 1, 5))},
    "echo": lambda rng: {"echo": True},
    "scored": lambda rng: {"echo": True, "logprobs": rng.choice((0, 2)), "max_tokens": 1},
    "score_only": lambda rng: {"echo": True, "logprobs": 1, "max_tokens": 0},
    "best_of": lambda rng: {"best_of": 3, "n": rng.choice((1, 2)), "temperature": 1.0},
    "suffix": lambda rng: {"suffix": "and so on"},
}  # fmt: skip

CONSTRAINTS = {
    "guided_regex", "guided_grammar", "guided_choice", "guided_json", "json_schema", "required",
    "named",
}  # fmt: skip
# Of each of these only one at a time: together they have no meaning, or an error's.
EXCLUSIVE = (
    CONSTRAINTS | {"json_object", "bad_schema", "text", "tools"},
    {
        "max_tokens", "min_tokens", "max_completion_tokens", "ignore_eos", "scored", "score_only",
        "json_object",
    },
    {"no_turn", "continued"},
    {"logprobs", "top_logprobs", "scored", "score_only"},
    {"echo", "scored", "score_only"},
    {"stop", "min_tokens"},
    {"n", "best_of"},
    {"suffix"},
)  # fmt: skip


def seeded_requests(count: int, seed: int, model: str) -> list[SeededRequest]:
    """First every parameter alone, for both endpoints; then several together at random."""
    rng = random.Random(seed)
    plans = [("chat", [name]) for name in CHAT] + [("text", [name]) for name in COMPLETION]
    while len(plans) < count:
        kind = rng.choice(("chat", "text"))
        plans.append((kind, _some(rng, list(CHAT if kind == "chat" else COMPLETION))))
    rng.shuffle(plans)
    make = {"chat": _chat, "text": _completion}
    return [make[kind](rng, names, model) for kind, names in plans[:count]]


def _some(rng: random.Random, names: list[str]) -> list[str]:
    chosen: list[str] = []
    for name in rng.sample(names, rng.randint(2, 6)):
        groups = [group for group in EXCLUSIVE if name in group]
        if not any(other in group for group in groups for other in chosen):
            chosen.append(name)
    return chosen


def _fields(rng: random.Random, names: list[str], table: dict[str, Parameter]) -> Fields:
    fields: Fields = {"seed": rng.randrange(2**32), "max_tokens": 20}
    if rng.random() < 0.5:
        fields["temperature"] = 0.8
    for name in names:
        fields |= table[name](rng)
    return fields


def _question(rng: random.Random) -> str:
    return f"What is {rng.randrange(10_000)} {rng.choice('+-')} {rng.randrange(10_000)}?"


def _chat(rng: random.Random, names: list[str], model: str) -> SeededRequest:
    question = _question(rng)
    message: Fields = {"role": "user", "content": question}
    messages = rng.choice(
        (
            [message],
            [{"role": "system", "content": "Zähle genau. ☕"}, message],
            [{"role": "developer", "content": "Be brief."}, message],
            [{"role": "user", "content": [{"type": "text", "text": question}]}],
            [message, {"role": "assistant", "content": "The answer is 5."}, message],
            _conversation_with_a_tool(message),
        )
    )
    if "continued" in names:
        messages = [message, {"role": "assistant", "content": "<think>\n12+"}]
    fields = _fields(rng, names, CHAT)
    if CONSTRAINTS & set(names) and fields["max_tokens"] == 20:
        fields["max_tokens"] = 90  # the constraint begins behind the thinking
    if "max_completion_tokens" in fields:
        del fields["max_tokens"]
    body = {"model": model, "messages": messages} | fields
    return _request("/v1/chat/completions", body, names)


def _conversation_with_a_tool(message: Fields) -> list[Fields]:
    call = {"name": "get_weather", "arguments": '{"place":"Paris","days":2}'}
    calls = [{"id": "call_1", "type": "function", "function": call}]
    return [
        message,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]


def _completion(rng: random.Random, names: list[str], model: str) -> SeededRequest:
    tokens = [rng.randrange(7, 768) for _ in range(rng.choice((1, 5, 64, 150)))]
    prompt: Any = rng.choice(
        (_question(rng), "naïve ☕ 東", [_question(rng), "two"], tokens, [tokens, tokens[:3]])
    )
    body = {"model": model, "prompt": prompt} | _fields(rng, names, COMPLETION)
    return _request("/v1/completions", body, names)


def _request(path: str, body: Fields, names: list[str]) -> SeededRequest:
    refused = {"bad_schema", "suffix"} & set(names)
    return SeededRequest(path, body, "best_of" not in names, 400 if refused else 200)
