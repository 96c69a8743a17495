"""A real gateway on a real socket, in front of fake workers; shared by a module's tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from core.token_ids import unpack_ids
from gateway.base.settings import GatewaySettings
from gateway.formats.deepseek_v31 import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from gateway.formats.kimi_k2 import KIMI_K2
from gateway.http.listener import listen_on
from gateway.prompt.served_model import ServedModel
from gateway.server import serve
from proto.generate_pb2 import GenerateRequest
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import EOS_ID, make_model_folder, make_tokenizer

TOKENIZER = make_tokenizer()
MODEL = "tiny/model"


def v3_call(name: str, arguments: str) -> str:
    """One call as DeepSeek-V3 and R1 write it."""
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


# What the fake workers answer, by what the prompt's text begins with.
ANSWERS = {
    "opened": "hm, naïve</think>\n\nyes",
    "plain": "The cat and the dog sat in the sun, then they slept.",
    "unicode": "naïve café — 日本語 🙂🙃 e\u0301 end",
    "think": "<think>one and one</think>two",
    "repeat": "ab" * 40,
    "long": "word " * 80,
    "empty": "",
    "special": "a<|User|>b",
    "one call": "I look.\n"
    + CALLS_BEGIN
    + v3_call("weather", '{"city": "Zürich {x}"}')
    + CALLS_END,
    "two calls": "<think>which?</think>"
    + CALLS_BEGIN
    + v3_call("weather", '{"city":"Bern"}')
    + "\n"
    + v3_call("time", '{"zone": {"name": "a\\"}", "n": [1, 2]}}')
    + CALLS_END,
    "new calls": CALLS_BEGIN + f'{CALL_BEGIN}time{SEPARATOR}{{"zone":"CET"}}{CALL_END}' + CALLS_END,
    "bare call": CALLS_BEGIN + f"{CALL_BEGIN}function{SEPARATOR}now{CALL_END}" + CALLS_END,
    "kimi call": "I look." + KIMI_K2.write(KIMI_K2.call("weather", '{"city": "Zürich"}')) + " ",
    "no call": f"a {CALLS_BEGIN}nothing",
    "text within": "I look."
    + CALLS_BEGIN
    + v3_call("weather", '{"city": "Bern"}')
    + CALLS_END
    + "Or so."
    + CALLS_BEGIN
    + v3_call("time", "{}")
    + CALLS_END
    + " End",
    "no object": CALLS_BEGIN + v3_call("weather", '["Zürich \\"\n", 1]') + CALLS_END,
}


def answer_text(text: str) -> str:
    return next((a for start, a in ANSWERS.items() if start in text), ANSWERS["plain"])


def tokens_of(request: GenerateRequest) -> list[int]:
    """Sampled requests differ by seed in the first letter; everything ends with EOS."""
    prompt = TOKENIZER.decode(list(unpack_ids(request.prompt_token_ids)))
    tokens: list[int] = TOKENIZER.encode(answer_text(prompt)).ids
    if request.sampling.temperature > 0:
        letter = chr(ord("A") + request.sampling.seed % 26)
        tokens = [*TOKENIZER.encode(letter).ids, *tokens]
    return [*tokens, EOS_ID]


@dataclass
class Gateway:
    url: str
    client: httpx.AsyncClient
    cluster: FakeCluster

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json={"model": MODEL, "temperature": 0} | body)

    async def complete(self, prompt: Any = "plain", **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", prompt=prompt, **{"max_tokens": 200} | body)

    async def chat(self, content: Any = "plain", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", messages=messages, **body)


@asynccontextmanager
async def running_gateway(
    cluster: FakeCluster, model_folder: Path, *, stop: asyncio.Event | None = None, **fields: Any
) -> AsyncIterator[Gateway]:
    settings = GatewaySettings(
        listen="127.0.0.1:0",
        model=model_folder,
        served_model_name=MODEL,
        **{
            "router": cluster.router.server.address,
            "grace_seconds": 0.5,
            # A server that is stopped may say that it leaves, or just be gone: sooner than the
            # client below gives up.
            "replacement_seconds": 8,
        }
        | fields,
    )
    listener = listen_on(settings.listen)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop = stop or asyncio.Event()
    task = asyncio.create_task(serve(settings, ServedModel.load(settings), listener, stop))
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await asyncio.wait_for(cluster.router.announced.wait(), 20)
            while (await client.get("/health")).status_code != 200:
                await asyncio.sleep(0.01)
            yield Gateway(url, client, cluster)
    finally:
        stop.set()
        await asyncio.wait_for(task, 20)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("gateway") / "model")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tokens_of, EOS_ID) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(shared_cluster: FakeCluster, model_folder: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(shared_cluster, model_folder) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared_gateway: Gateway) -> Gateway:
    """The module's gateway, its fakes as new."""
    shared_gateway.cluster.router.reset()
    return shared_gateway
