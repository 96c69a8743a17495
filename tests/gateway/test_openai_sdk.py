"""The openai SDK, unmodified, sync and async, streaming and not."""

import asyncio

import openai
import pytest

from core.errors import Overloaded, Unavailable
from tests.gateway.conftest import ANSWERS, MODEL, Gateway
from tests.gateway.fake_cluster import Plan

pytestmark = pytest.mark.asyncio(loop_scope="module")


def async_client(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


def sync_client(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


async def test_chat(gateway: Gateway) -> None:
    async with async_client(gateway) as client:
        reply = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "unicode"}],
            temperature=0,
            logprobs=True,
            top_logprobs=2,
        )
    (choice,) = reply.choices
    assert choice.message.content == ANSWERS["unicode"]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    spelled = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert spelled.decode() == ANSWERS["unicode"]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply._request_id


async def test_chat_stream(gateway: Gateway) -> None:
    async with async_client(gateway) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "unicode"}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWERS["unicode"]
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_sync_clients(gateway: Gateway) -> None:
    def ask() -> tuple[str, str, list[str]]:
        with sync_client(gateway) as client:
            whole = client.completions.create(model=MODEL, prompt="plain", max_tokens=99)
            stream = client.completions.create(
                model=MODEL, prompt="think", temperature=0, max_tokens=99, stream=True
            )
            text = "".join(chunk.choices[0].text for chunk in stream)
            return whole.choices[0].text, text, [model.id for model in client.models.list()]

    whole, streamed, models = await asyncio.to_thread(ask)
    assert whole[1:] == ANSWERS["plain"]  # the first letter is the seed's
    assert streamed == ANSWERS["think"]
    assert models == [MODEL]


async def test_sync_chat_stream_and_model(gateway: Gateway) -> None:
    def ask() -> tuple[str, str]:
        with sync_client(gateway) as client:
            stream = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "plain"}],
                temperature=0,
                stream=True,
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return text, client.models.retrieve(MODEL).id

    assert await asyncio.to_thread(ask) == (ANSWERS["plain"], MODEL)


async def test_errors_are_the_sdks(gateway: Gateway) -> None:
    async with async_client(gateway) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="a", temperature=9)
        assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
        assert bad.value.request_id
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt="a")
        assert missing.value.code == "model_not_found"
        gateway.cluster.router.errors.append(Overloaded("full"))
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=MODEL, prompt="a")
        gateway.cluster.router.errors.extend([Unavailable("nobody")] * 50)
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model=MODEL, prompt="a")


async def test_an_error_in_mid_stream_is_raised(gateway: Gateway) -> None:
    cluster = gateway.cluster
    for decode in (cluster.first, cluster.second):
        decode.plan = Plan(fail_after=2, error=Unavailable("lost it"))
    cluster.first.plan.step_seconds = 0.05
    async with async_client(gateway) as client:
        stream = await client.completions.create(
            model=MODEL, prompt="plain", max_tokens=99, stream=True
        )
        cluster.router.down = {cluster.first.epoch, cluster.second.epoch}
        with pytest.raises(openai.APIError, match="no pair of workers") as raised:
            async for _ in stream:
                pass
    assert raised.value.code == "unavailable"


async def test_closing_a_stream_aborts_it(gateway: Gateway) -> None:
    decode = gateway.cluster.first
    decode.plan.hang_after = 3
    async with async_client(gateway) as client:
        stream = await client.completions.create(model=MODEL, prompt="plain", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await asyncio.wait_for(decode.cancelled.wait(), 20)
