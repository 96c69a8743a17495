"""Random requests through all three APIs, streamed and not: the same is told of the same output,
which is what the request's own grammar lets a worker write behind random thoughts."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from jsonschema import Draft202012Validator

from gateway.formats.deepseek_v3 import DEEPSEEK_V3
from gateway.formats.kimi_k2 import KIMI_K2, SECTION_BEGIN
from gateway.formats.tool_format import ToolFormat
from proto.generate_pb2 import GenerateRequest
from tests.gateway.conftest import MODEL, Gateway, running_gateway
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import EOS, EOS_ID, TEMPLATE, THINK, make_model_folder
from tests.gateway.stream import join

pytest.importorskip("torch")
from tests.gateway.grammar.walks import TOKENIZER, VOCAB_SIZE, begin, walked  # noqa: E402 - as above

NUM_REQUESTS = 12
MAX_TOKENS = 4000  # an output that is walked has fewer
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}},
     "required": ["city"], "additionalProperties": False},
    {"type": "object", "properties": {"n": {"enum": [1, "</think>", "<|tool_call_end|>", None]}},
     "required": ["n"], "additionalProperties": False},
]  # fmt: skip
SAID = ["hi", f"a {EOS} b", THINK[1], f"{THINK[0]}\n{SECTION_BEGIN}", "日本 {x}"]

Calls = list[tuple[str, Any]]
Told = tuple[str, str, Calls]  # thoughts, text, and calls with their arguments


class Clients(NamedTuple):
    gateway: Gateway
    messages: anthropic.AsyncAnthropic
    responses: openai.AsyncOpenAI


class Asked(NamedTuple):
    """`choice`: of the chat API, or a tool's name."""

    said: str
    tools: list[str]
    choice: str
    schema: dict[str, Any] | None


def random_request(rng: random.Random) -> Asked:
    tools = rng.sample(["weather", "f"], rng.randint(0, 2))
    choice = rng.choice(["auto", "required", "none", tools[0]]) if tools else "none"
    schema = rng.choice(SCHEMAS if choice == "none" else [*SCHEMAS, None])
    return Asked(rng.choice(SAID) + str(rng.random()), tools, choice, schema)


class Worker:
    """Its model opens its thoughts, or the prompt does; they may end with a call."""

    def __init__(self, folder: Path, *, opens: bool) -> None:
        self.folder = folder
        self.thoughts = ""  # of the last output
        self._opens = opens

    def tokens_of(self, request: GenerateRequest) -> list[int]:
        rng = random.Random(request.prompt_token_ids)
        grammar = request.sampling.grammar
        match = begin(self.folder, grammar)
        ends_by_call = f"<[{TOKENIZER.token_to_id(SECTION_BEGIN)}]>" in grammar.lark
        marks = DEEPSEEK_V3.begins[0] if ends_by_call else f"a{SECTION_BEGIN}b"
        self.thoughts = rng.choice(["so\nnaïve ", marks, ""])
        begun = [THINK[0]] if self._opens else []
        end = rng.choice([THINK[1], SECTION_BEGIN] if ends_by_call else [THINK[1]])
        ids = TOKENIZER.encode("".join([*begun, self.thoughts, end])).ids
        assert all(map(match.accept, ids))
        assert match.is_active
        return [*ids, *walked(match, rng), EOS_ID]


def chat_body(asked: Asked) -> dict[str, Any]:
    tools = [{"type": "function", "function": one} for one in functions(asked, "parameters")]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": asked.said}]}
    if tools:
        named = {"type": "function", "function": {"name": asked.choice}}
        choice = named if asked.choice in asked.tools else asked.choice
        body |= {"tools": tools, "tool_choice": choice}
    if asked.schema is not None:
        schema = {"name": "s", "schema": asked.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body | {"max_tokens": MAX_TOKENS}


def functions(asked: Asked, schema: str) -> list[dict[str, Any]]:
    pairs = zip(asked.tools, SCHEMAS, strict=False)
    return [{"name": name, schema: one, "strict": True} for name, one in pairs]


async def by_chat(clients: Clients, asked: Asked, *, stream: bool) -> Told:
    body = chat_body(asked) | {"stream": stream}
    reply = await clients.gateway.post("/v1/chat/completions", **body)
    assert reply.status_code == 200, reply.text
    if stream:
        (one,), _ = join(reply, chat=True)
        calls = [(call["name"], json.loads(call["arguments"])) for call in one.calls]
        return one.reasoning, one.text, calls
    message = reply.json()["choices"][0]["message"]
    made = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(one["name"], json.loads(one["arguments"])) for one in made]
    return message.get("reasoning_content", ""), message["content"] or "", calls


async def by_messages(clients: Clients, asked: Asked, *, stream: bool) -> Told:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": asked.said}]}
    if asked.tools:
        kinds = {"required": {"type": "any"}, "auto": {"type": "auto"}, "none": {"type": "none"}}
        choice = kinds.get(asked.choice, {"type": "tool", "name": asked.choice})
        body |= {"tools": functions(asked, "input_schema"), "tool_choice": choice}
    if asked.schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": asked.schema}}
    body |= {"model": MODEL, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
    if stream:
        async with clients.messages.messages.stream(**body) as events:
            message = await events.get_final_message()
    else:
        message = await clients.messages.messages.create(**body, timeout=60)
    parts: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
    for block in message.content:
        parts[block.type].append(block)
    return (
        "".join(block.thinking for block in parts["thinking"]),
        "".join(block.text for block in parts["text"]),
        [(block.name, block.input) for block in parts["tool_use"]],
    )


async def by_responses(clients: Clients, asked: Asked, *, stream: bool) -> Told:
    body: dict[str, Any] = {"input": asked.said, "model": MODEL, "temperature": 0}
    if asked.tools:
        tools = [{"type": "function", **one} for one in functions(asked, "parameters")]
        named = {"type": "function", "name": asked.choice}
        choice = named if asked.choice in asked.tools else asked.choice
        body |= {"tools": tools, "tool_choice": choice}
    if asked.schema is not None:
        wanted = {"type": "json_schema", "name": "s", "schema": asked.schema}
        body["text"] = {"format": wanted}
    body["max_output_tokens"] = MAX_TOKENS
    reply: Any = await clients.responses.responses.create(**body, stream=stream)
    if stream:
        reply = [event async for event in reply][-1].response
    thoughts = [item.content for item in reply.output if item.type == "reasoning"]
    made = [item for item in reply.output if item.type == "function_call"]
    return (
        "".join(part.text for parts in thoughts for part in parts),
        reply.output_text,
        [(item.name, json.loads(item.arguments)) for item in made],
    )


def check(asked: Asked, worker: Worker, told: Told) -> None:
    thoughts, text, calls = told
    assert thoughts == TOKENIZER.decode(TOKENIZER.encode(worker.thoughts).ids)
    assert not (calls and text)
    if asked.choice not in ("auto", "none"):
        assert calls
    schemas = dict(zip(asked.tools, SCHEMAS, strict=False))
    for name, arguments in calls:
        assert asked.choice in ("auto", "required", name)
        Draft202012Validator(schemas[name]).validate(arguments)
    if not calls and asked.schema is not None:
        Draft202012Validator(asked.schema).validate(json.loads(text))


@pytest.mark.parametrize(("form", "opens"), [(DEEPSEEK_V3, True), (KIMI_K2, False)])
async def test_what_a_grammar_wrote(tmp_path: Path, form: ToolFormat, opens: bool) -> None:
    folder = make_model_folder(
        tmp_path / "model", max_position_embeddings=8192, vocab_size=VOCAB_SIZE
    )
    TOKENIZER.save(str(folder / "tokenizer.json"))
    begins = TEMPLATE.replace("{{ '<|Assistant|>' }}", "{{ '<|Assistant|><think>\n' }}")
    (folder / "chat_template.jinja").write_text(TEMPLATE + "{# </think> #}" if opens else begins)
    worker, rng = Worker(folder, opens=opens), random.Random(form.name)
    async with (
        FakeCluster(worker.tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, folder, tool_call_parser=form.name) as gateway,
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none") as messages,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as responses,
    ):
        clients = Clients(gateway, messages, responses)
        for _ in range(NUM_REQUESTS):
            asked = random_request(rng)
            told = await by_chat(clients, asked, stream=False)
            check(asked, worker, told)
            for by in (by_chat, by_messages, by_responses):
                for stream in (True, False):
                    cluster.first.plan.step_tokens = rng.choice([1, 3, 9, 1000])
                    assert await by(clients, asked, stream=stream) == told, (asked, by, stream)
