"""/tokenize and /detokenize, against the tokenizers library and what workers are sent."""

from typing import Any

import pytest

from core.token_ids import unpack_ids
from tests.gateway.conftest import MODEL, TOKENIZER, Gateway
from tests.gateway.model_folder import BOS_ID, MAX_POSITION, VOCAB_SIZE

USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def tokenize(gateway: Gateway, **body: Any) -> dict[str, Any]:
    reply = await gateway.client.post("/tokenize", json=body)
    assert reply.status_code == 200, reply.text
    parsed: dict[str, Any] = reply.json()
    return parsed


async def test_a_text(gateway: Gateway) -> None:
    ids = TOKENIZER.encode("naïve 日本").ids
    body = await tokenize(gateway, model=MODEL, prompt="naïve 日本")
    assert body == {
        "count": len(ids) + 1, "max_model_len": MAX_POSITION, "tokens": [BOS_ID, *ids],
        "token_strs": None,
    }  # fmt: skip
    body = await tokenize(gateway, prompt="naïve", add_special_tokens=False, return_token_strs=True)
    assert body["tokens"] == TOKENIZER.encode("naïve").ids
    assert body["token_strs"][:2] == ["n", "a"]
    assert len(body["token_strs"]) == body["count"]


async def test_messages_are_what_a_chat_sends(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": "plain"}]
    await gateway.post("/v1/chat/completions", messages=messages)
    (request,) = gateway.cluster.first.requests
    body = await tokenize(gateway, messages=messages)
    assert body["tokens"] == list(unpack_ids(request.prompt_token_ids))
    without = await tokenize(gateway, messages=messages, add_generation_prompt=False)
    assert without["tokens"] == body["tokens"][:-1]


async def test_there_and_back(gateway: Gateway) -> None:
    text = "naïve — 日本語 🙂 <think>"
    body = await tokenize(gateway, prompt=text, add_special_tokens=False)
    reply = await gateway.client.post("/detokenize", json={"tokens": body["tokens"]})
    assert reply.json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [USER], "tools": [TOOL] * 129}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_bad_bodies(gateway: Gateway, path: str, body: dict[str, Any], param: str) -> None:
    reply = await gateway.client.post(path, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


async def test_unknown_model(gateway: Gateway) -> None:
    reply = await gateway.client.post("/tokenize", json={"model": "other", "prompt": "a"})
    assert reply.status_code == 404
