"""Thoughts told apart from the answer, streamed and not."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import AddedToken

from core.token_ids import unpack_ids
from gateway.formats.kimi_k2 import KIMI_K2, KIMI_K2_THOUGHTS
from gateway.output.chat_output import ChatOutput
from gateway.output.choice_delta import CallDelta, join_deltas
from gateway.output.tool_call_parser import ToolCallParser
from gateway.text.think_marks import ThinkMarks
from gateway.text.tokenizer import Tokenizer
from proto.generate_pb2 import FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED, Token
from tests.gateway.conftest import TOKENIZER, Gateway, running_gateway
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import TEMPLATE, THINK, make_model_folder, make_tokenizer
from tests.gateway.stream import events_of, join, joined_logprobs

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking(
    shared_cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """A model whose template opens the thoughts, as R1's does."""
    folder = make_model_folder(tmp_path_factory.mktemp("thinking") / "model")
    template = TEMPLATE.replace("{{ '<|Assistant|>' }}", "{{ '<|Assistant|><think>\n' }}")
    (folder / "chat_template.jinja").write_text(template)
    async with running_gateway(shared_cluster, folder) as gateway:
        yield gateway


async def ask(gateway: Gateway, content: str, **fields: Any) -> tuple[dict[str, Any], Any]:
    """The message and the whole body; streamed in the same way."""
    body = (await gateway.chat(content, **fields)).json()
    reply = await gateway.chat(
        content, **fields, stream=True, stream_options={"include_usage": True}
    )
    (joined,), usage = join(reply, chat=True)
    (choice,) = body["choices"]
    message = choice["message"]
    assert joined.text == message["content"]
    assert joined.reasoning == message.get("reasoning_content", "")
    assert joined.finish_reason == choice["finish_reason"]
    assert usage == body["usage"]
    if choice["logprobs"] is not None:
        assert joined_logprobs(joined.logprobs, chat=True) == choice["logprobs"]["content"]
    return message, body


@pytest.mark.parametrize("step_tokens", [1, 3, 100])
async def test_the_model_opens_its_thoughts(gateway: Gateway, step_tokens: int) -> None:
    gateway.cluster.first.plan.step_tokens = step_tokens
    message, body = await ask(gateway, "think")
    assert (message["reasoning_content"], message["content"]) == ("one and one", "two")
    num_thoughts = len(TOKENIZER.encode("one and one").ids)
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thoughts}
    num_answer = len(TOKENIZER.encode("two").ids)
    assert body["usage"]["completion_tokens"] == num_thoughts + num_answer + 3  # marks, EOS


async def test_without_thoughts(gateway: Gateway) -> None:
    message, body = await ask(gateway, "plain")
    assert "reasoning_content" not in message
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("step_tokens", [1, 4])
async def test_the_template_opens_them(thinking: Gateway, step_tokens: int) -> None:
    thinking.cluster.router.reset()
    thinking.cluster.first.plan.step_tokens = step_tokens
    message, _ = await ask(thinking, "opened")
    assert (message["reasoning_content"], message["content"]) == ("hm, naïve", "\n\nyes")


async def test_the_client_decides(shared_cluster: FakeCluster, tmp_path: Path) -> None:
    """With a template such as V3.1's; /tokenize counts the same prompt."""
    folder = make_model_folder(tmp_path / "model")
    mark = "{{ '<|Assistant|>' + ('<think>' if thinking else '</think>') }}"
    template = TEMPLATE.replace("{{ '<|Assistant|>' }}", mark)
    assert template != TEMPLATE
    (folder / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "opened"}]
    async with running_gateway(shared_cluster, folder) as gateway:
        for fields, opens in (
            ({}, False),
            ({"thinking": {"type": "enabled"}}, True),
            ({"thinking": {"type": "disabled"}}, False),
            ({"chat_template_kwargs": {"thinking": True}}, True),
            ({"chat_template_kwargs": {"enable_thinking": True}}, True),
            ({"reasoning_effort": "high"}, True),
            ({"reasoning_effort": "none"}, False),
            ({"reasoning_effort": "minimal"}, False),
            ({"reasoning_effort": "low", "thinking": {"type": "enabled"}}, True),
        ):
            shared_cluster.router.reset()
            reply = await gateway.post("/v1/chat/completions", messages=messages, **fields)
            assert ("reasoning_content" in reply.json()["choices"][0]["message"]) == opens
            (request,) = shared_cluster.first.requests
            last = unpack_ids(request.prompt_token_ids)[-1]
            assert last == TOKENIZER.token_to_id(THINK[0 if opens else 1])
            counted = await gateway.client.post("/tokenize", json={"messages": messages} | fields)
            assert counted.json()["tokens"] == list(unpack_ids(request.prompt_token_ids))


async def test_a_template_that_leaves_no_choice(gateway: Gateway, thinking: Gateway) -> None:
    for asked, only in ((thinking, "enabled"), (gateway, "disabled")):
        for wanted in ("enabled", "disabled"):
            reply = await asked.chat("opened", thinking={"type": wanted})
            assert reply.status_code == (200 if wanted == only else 400), (only, wanted)
    reply = await gateway.complete("plain", thinking={"type": "enabled"})
    assert reply.json()["error"]["param"] == "thinking"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opening(
    shared_cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """A model that opens its thoughts itself, as R1-0528 does: its template leaves out those of
    earlier turns."""
    folder = make_model_folder(tmp_path_factory.mktemp("opening") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE + "{# split('</think>') #}")
    async with running_gateway(shared_cluster, folder) as gateway:
        yield gateway


async def test_who_always_thinks_can_be_asked_to(opening: Gateway, thinking: Gateway) -> None:
    for asked in (opening, thinking):
        for fields, status in (
            ({"thinking": {"type": "enabled"}}, 200),
            ({"thinking": {"type": "disabled"}}, 400),
            ({"chat_template_kwargs": {"thinking": True}}, 200),
            ({"chat_template_kwargs": {"enable_thinking": False}}, 400),
            ({"reasoning_effort": "none"}, 400),
            ({"reasoning_effort": "high"}, 400),
        ):
            reply = await asked.chat("think", **fields)
            assert reply.status_code == status, fields
            if status == 400:
                assert reply.json()["error"]["param"] in fields


async def test_who_never_thinks_cannot(gateway: Gateway) -> None:
    for fields, status in (
        ({"chat_template_kwargs": {"thinking": True}}, 400),
        ({"chat_template_kwargs": {"thinking": False}}, 200),
        ({"reasoning_effort": "minimal"}, 200),
        ({"reasoning_effort": "low"}, 400),
        ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, 400),
    ):
        reply = await gateway.chat("plain", **fields)
        assert reply.status_code == status, fields


async def test_levels_of_effort_are_the_templates(
    shared_cluster: FakeCluster, tmp_path: Path
) -> None:
    shared_cluster.router.reset()
    folder = make_model_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("<|User|>{{ reasoning_effort }}!")
    async with running_gateway(shared_cluster, folder) as gateway:
        for effort in ("low", "none", "xhigh"):
            assert (await gateway.chat("plain", reasoning_effort=effort)).status_code == 200
            prompt = unpack_ids(shared_cluster.first.requests[-1].prompt_token_ids)
            assert TOKENIZER.decode(list(prompt)) == f"{effort}!"


async def test_opened_twice(thinking: Gateway) -> None:
    thinking.cluster.router.reset()
    message, _ = await ask(thinking, "think")
    assert (message["reasoning_content"], message["content"]) == ("one and one", "two")


async def test_cut_off_while_thinking(thinking: Gateway) -> None:
    thinking.cluster.router.reset()
    message, body = await ask(thinking, "opened", max_tokens=3)
    assert message == {
        "role": "assistant", "content": "", "refusal": None, "reasoning_content": "hm,",
    }  # fmt: skip
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_a_character_cut_off_in_thought(thinking: Gateway) -> None:
    thinking.cluster.router.reset()
    num_whole = len(TOKENIZER.encode("hm, na").ids)
    message, _ = await ask(thinking, "opened", max_tokens=num_whole + 1)
    assert message["reasoning_content"] == "hm, na�"


async def test_thoughts_may_be_left_out(gateway: Gateway) -> None:
    message, body = await ask(gateway, "think", include_reasoning=False)
    assert message == {"role": "assistant", "content": "two", "refusal": None}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    events = events_of(await gateway.chat("think", include_reasoning=False, stream=True))
    assert all("reasoning_content" not in event["choices"][0]["delta"] for event in events)


async def test_stop_strings_count_in_the_answer_only(gateway: Gateway) -> None:
    message, _ = await ask(gateway, "think", stop=["and", "wo"])
    assert (message["reasoning_content"], message["content"]) == ("one and one", "t")


async def test_space_in_front_of_an_answer_counts_once() -> None:
    """Among the tokens behind which stop strings begin to count, too."""
    tokenizer = Tokenizer(make_tokenizer(), special_tokens={}, adds_bos=False)
    output = ChatOutput(
        tokenizer, marks=ThinkMarks.of(tokenizer), is_thinking=False, tools=None, stops=("x",),
        min_tokens=4, logprobs=False, end_token_ids=(),
    )  # fmt: skip
    text = "".join(
        output.feed([Token(token_id=token_id)], FINISH_REASON_UNSPECIFIED).text
        for token_id in TOKENIZER.encode("\n\n\nx-x").ids
    )
    assert (text, output.finish_reason, output.num_tokens) == ("\n\n\nx-", "stop", 6)


async def test_logprobs_stand_apart(gateway: Gateway) -> None:
    _, body = await ask(gateway, "think", logprobs=True, top_logprobs=1)
    logprobs = body["choices"][0]["logprobs"]
    for name, text in (("content", "two"), ("reasoning_content", "one and one")):
        spelled = b"".join(bytes(entry["bytes"]) for entry in logprobs[name])
        assert spelled.decode() == text


async def test_the_parser_can_be_off(shared_cluster: FakeCluster, model_folder: Path) -> None:
    shared_cluster.router.reset()
    async with running_gateway(shared_cluster, model_folder, reasoning_parser="off") as gateway:
        message, body = await ask(gateway, "think")
    assert message["content"] == "<think>one and one</think>two"
    assert "completion_tokens_details" not in body["usage"]


TOOL = {"type": "function", "function": {"name": "f", "strict": True}}
CONSTRAINTS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"guided_json": {"type": "integer"}},
    {"guided_regex": "a+"},
    {"guided_choice": ["a", "b"]},
    {"guided_grammar": 'root ::= "a"'},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tools": [TOOL]},
    {"tools": [TOOL], "response_format": {"type": "json_object"}},
]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tools in the prompt."""
    folder = tmp_path_factory.mktemp("room") / "model"
    return make_model_folder(folder, max_position_embeddings=4096)


@pytest.mark.parametrize("begin", ["<think>\n", "", "</think>"])
async def test_thoughts_come_before_what_is_constrained(
    shared_cluster: FakeCluster, room: Path, begin: str
) -> None:
    """The prompt has opened them; the model may; there are none."""
    marks = ThinkMarks.of(Tokenizer.load(room))
    assert marks is not None
    template = TEMPLATE.replace("{{ '<|Assistant|>' }}", "{{ '<|Assistant|>" + begin + "' }}")
    (room / "chat_template.jinja").write_text(template)
    async with running_gateway(shared_cluster, room) as gateway:
        for constraint in CONSTRAINTS:
            shared_cluster.router.reset()
            reply = await gateway.chat("plain", **constraint)
            assert reply.status_code == 200, reply.text
            (request,) = shared_cluster.first.requests
            grammar = request.sampling.grammar
            assert grammar.HasField("after_token_id") == (begin == "<think>\n")
            assert grammar.after_token_id in (0, marks.close)
            assert grammar.HasField("thoughts") == (begin == "")
            if grammar.HasField("thoughts"):
                ids = (grammar.thoughts.open_token_id, grammar.thoughts.close_token_id)
                assert ids == (marks.open, marks.close)


async def test_kimi_ends_its_thoughts_with_calls() -> None:
    """Its marks may be special tokens, which are not shown elsewhere."""
    fast = make_tokenizer()
    fast.add_tokens([AddedToken(mark, special=True) for mark in KIMI_K2.marks])
    tokenizer = Tokenizer(fast, special_tokens={}, adds_bos=False)
    output = ChatOutput(
        tokenizer, marks=ThinkMarks.of(tokenizer, KIMI_K2_THOUGHTS), is_thinking=True,
        tools=ToolCallParser(KIMI_K2, at_most_one=False), stops=(), min_tokens=0, logprobs=False,
        end_token_ids=(),
    )  # fmt: skip
    text = "so" + KIMI_K2.write(KIMI_K2.call("f", '{"a": 1}'))
    tokens = [Token(token_id=token_id) for token_id in fast.encode(text).ids]
    delta = join_deltas(
        [
            output.feed(tokens[:9], FINISH_REASON_UNSPECIFIED),
            output.feed(tokens[9:], FINISH_REASON_STOP),
        ]
    )
    assert (delta.reasoning, delta.text, delta.finish_reason) == ("so", "", "tool_calls")
    assert delta.calls == [CallDelta(0, '{"a": 1}', "functions.f:0", "f")]
    assert output.num_tokens == len(tokens)


@pytest.mark.parametrize("thinks", [True, False])
async def test_a_prefix_of_thoughts_is_continued(
    shared_cluster: FakeCluster, tmp_path: Path, thinks: bool
) -> None:
    """V3.1's template makes thoughts of a prefix, if the model is to think."""
    folder = make_model_folder(tmp_path / "model")
    spoken = "{{ '<|Assistant|>' + message['content'] + eos_token }}"
    mark = "('<think>' if message['prefix'] and thinking else '</think>')"
    template = TEMPLATE.replace(spoken, spoken.replace("message", mark + " + message", 1))
    assert mark in template
    (folder / "chat_template.jinja").write_text(template)
    messages = [
        {"role": "user", "content": "opened"},
        {"role": "assistant", "content": " so ", "prefix": True},
    ]
    thinking = {"type": "enabled" if thinks else "disabled"}
    async with running_gateway(shared_cluster, folder) as gateway:
        shared_cluster.router.reset()
        reply = await gateway.post("/v1/chat/completions", messages=messages, thinking=thinking)
    (request,) = shared_cluster.first.requests
    prompt = TOKENIZER.decode(list(unpack_ids(request.prompt_token_ids)), skip_special_tokens=False)
    opening = THINK[0 if thinks else 1]
    assert prompt == f"<|bos|><|User|>opened<|Assistant|>{opening} so "
    message = reply.json()["choices"][0]["message"]
    assert message.get("reasoning_content") == ("hm, naïve" if thinks else None)


async def test_a_message_that_is_thinking_is_continued(gateway: Gateway) -> None:
    messages = [
        {"role": "user", "content": "opened"},
        {"role": "assistant", "content": "<think>so"},
    ]
    body = (
        await gateway.post("/v1/chat/completions", messages=messages, continue_final_message=True)
    ).json()
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, naïve", "\n\nyes")
    (request,) = gateway.cluster.first.requests
    prompt = TOKENIZER.decode(list(unpack_ids(request.prompt_token_ids)), skip_special_tokens=False)
    assert prompt == "<|bos|><|User|>opened<|Assistant|><think>so"
