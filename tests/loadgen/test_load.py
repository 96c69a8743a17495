"""The load generator against a server that answers exactly what the test says."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from typer.testing import CliRunner

from ctl.main import app as ctl
from loadgen.load import LoadOptions, bodies, run_load
from loadgen.openai_stream import Target
from loadgen.prompts import arrival_times, token_prompts
from loadgen.summary import percentile, summarize

NUM_TOKENS = 5


class FakeServer:
    """An OpenAI server of `NUM_TOKENS` tokens a reply; `mode` says how it misbehaves."""

    def __init__(self) -> None:
        self.mode = "good"
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.most_at_once = 0
        self.least_at_once = 0  # no reply begins before there were so many
        self._at_once = 0
        self.app = FastAPI()
        self.app.add_api_route("/v1/models", self.models)
        self.app.add_api_route("/v1/completions", self.answer, methods=["POST"])
        self.app.add_api_route("/v1/chat/completions", self.answer, methods=["POST"])

    async def models(self) -> dict[str, Any]:
        return {"data": [{"id": "fake"}]}

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.url.path)
        if self.mode == "full":
            error = {"error": {"message": "come back later", "code": "overloaded"}}
            return JSONResponse(error, status_code=429)
        chat = request.url.path.startswith("/v1/chat")
        return StreamingResponse(self.events(chat, body), media_type="text/event-stream")

    async def events(self, chat: bool, body: dict[str, Any]) -> Any:  # noqa: ANN401
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if chat:
                yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            while self.most_at_once < self.least_at_once:
                await asyncio.sleep(0.001)
            for index in range(NUM_TOKENS):
                await asyncio.sleep(0.002)
                reason = "length" if index == NUM_TOKENS - 1 else None
                part = {"delta": {"content": "ü"}} if chat else {"text": "ü"}
                yield event({"choices": [{**part, "finish_reason": reason}]})
                if self.mode == "cut":
                    return
                if self.mode == "error":
                    yield event({"error": {"message": "worker died"}})
                    return
            usage = {"prompt_tokens": 7, "completion_tokens": NUM_TOKENS}
            usage |= {"prompt_tokens_details": {"cached_tokens": 3}}
            yield event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        finally:
            self._at_once -= 1


def event(value: dict[str, Any]) -> str:
    return f": a comment\n\ndata: {json.dumps(value)}\n\n"


@pytest.fixture
def fake() -> Iterator[tuple[FakeServer, str]]:
    server = FakeServer()
    listener = socket.create_server(("127.0.0.1", 0))
    runner = uvicorn.Server(uvicorn.Config(server.app, log_level="warning", loop="asyncio"))
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listener]})
    thread.start()
    yield server, f"http://127.0.0.1:{listener.getsockname()[1]}"
    runner.should_exit = True
    thread.join()
    listener.close()


def options(url: str) -> LoadOptions:
    return LoadOptions(url=url, model="fake", num_prompts=6, prompt_tokens=9, output_tokens=4)


async def test_outcomes_of_a_good_server(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    server.least_at_once = 3
    outcomes, seconds = await run_load(replace(options(url), concurrency=3))
    assert [outcome.index for outcome in outcomes] == list(range(6))
    assert server.most_at_once == 3
    for outcome in outcomes:
        assert outcome.error == ""
        assert outcome.text == "ü" * NUM_TOKENS
        assert outcome.num_output_tokens == NUM_TOKENS
        assert (outcome.num_prompt_tokens, outcome.num_cached_tokens) == (7, 3)
        assert len(outcome.inter_token_seconds) == NUM_TOKENS - 1
        assert 0.002 <= outcome.ttft_seconds < outcome.e2e_seconds < seconds
        total = outcome.ttft_seconds + sum(outcome.inter_token_seconds)
        assert total == pytest.approx(outcome.e2e_seconds)
    body = server.bodies[0]
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == 4
    assert len(body["prompt"]) == 9
    assert server.paths[0] == "/v1/completions"


async def test_chat_counts_from_the_first_content(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    outcomes, _ = await run_load(replace(options(url), endpoint="chat"))
    assert server.paths == ["/v1/chat/completions"] * 6
    assert len(server.bodies[0]["messages"][0]["content"].split()) == 9
    # The event that names the role is no token.
    assert {len(outcome.inter_token_seconds) for outcome in outcomes} == {NUM_TOKENS - 1}


async def test_open_loop_sends_all_without_waiting_for_answers(
    fake: tuple[FakeServer, str],
) -> None:
    server, url = fake
    server.least_at_once = 2  # nobody is answered before
    outcomes, _ = await run_load(replace(options(url), request_rate=5000.0))
    assert [outcome.error for outcome in outcomes] == [""] * 6
    assert server.most_at_once >= 2


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("full", "HTTP 429: come back later"),
        ("cut", "the stream ended without [DONE]"),
        ("error", "worker died"),
    ],
)
async def test_failures_are_counted_with_their_reason(
    fake: tuple[FakeServer, str], mode: str, reason: str
) -> None:
    server, url = fake
    server.mode = mode
    outcomes, seconds = await run_load(options(url))
    summary = summarize(outcomes, seconds)
    assert dict(summary.errors) == {reason: 6}
    assert summary.latencies == {}
    assert {figure.metric: figure.value for figure in summary.figures()}["num_errors"] == 6


async def test_no_server_and_a_server_that_hangs() -> None:
    outcomes, _ = await run_load(options("http://127.0.0.1:1"))
    assert all("onnect" in outcome.error for outcome in outcomes)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        slow = replace(options(url), num_prompts=1, timeout_seconds=0.1)
        outcomes, _ = await run_load(slow)
    assert [outcome.error for outcome in outcomes] == ["TimeoutError"]


async def test_a_server_that_speaks_no_http() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"220 mail ready\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    outcomes, _ = await run_load(replace(options(url), num_prompts=1))
    server.close()
    assert "does not speak HTTP" in outcomes[0].error


def test_ctl_bench_prints_and_saves(fake: tuple[FakeServer, str], tmp_path: Path) -> None:
    _, url = fake
    file = tmp_path / "results" / "run.jsonl"
    arguments = f"bench --url {url} --concurrency 2 --num-prompts 4 --json {file}"
    result = CliRunner().invoke(ctl, arguments.split())
    assert result.exit_code == 0, result.output
    assert "4 requests, 0 errors" in result.stdout
    assert {"ttft", "itl", "tpot", "e2e"} <= {
        line.split()[0] for line in result.stdout.splitlines() if line.strip()
    }
    records = {line["metric"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert records["num_requests"]["value"] == 4
    assert records["ttft_p99"]["unit"] == "s"
    assert (
        records["ttft_p99"]["case"] == "completions, concurrency 2, 4 requests of 128 + 64 tokens"
    )
    assert records["output_throughput"]["value"] > 0


def test_ctl_bench_fails_when_requests_fail(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    server.mode = "full"
    result = CliRunner().invoke(ctl, ["bench", "--url", url, "--num-prompts", "3"])
    assert result.exit_code == 1
    assert "3 x HTTP 429: come back later" in result.stderr
    assert CliRunner().invoke(ctl, ["bench", "--url", "http://127.0.0.1:1"]).exit_code == 1
    assert CliRunner().invoke(ctl, ["bench", "--url", "nonsense", "--model", "x"]).exit_code == 2


def test_prompts_depend_on_the_seed_only() -> None:
    assert token_prompts(1, 3, 50) == token_prompts(1, 3, 50)
    assert token_prompts(1, 3, 50) != token_prompts(2, 3, 50)
    assert {len(prompt) for prompt in token_prompts(1, 3, 50)} == {50}
    first, second = token_prompts(1, 2, 50, shared_prefix_tokens=20)
    assert first[:20] == second[:20]
    assert first[20:] != second[20:]
    with pytest.raises(ValueError, match="prefix"):
        token_prompts(1, 1, 5, shared_prefix_tokens=6)


def test_arrivals_are_a_poisson_process() -> None:
    times = arrival_times(0, 4001, 20.0)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    # An exponential distribution's standard deviation is its mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(
        mean, rel=0.08
    )
    with pytest.raises(ValueError, match="rate"):
        arrival_times(0, 1, 0.0)


def test_percentiles_are_numpys() -> None:
    numpy = pytest.importorskip("numpy")
    source = [0.3, 9.0, 2.5, 2.5, 7.1, 0.0, 4.4]
    for percent in (0, 1, 50, 90, 99, 100):
        expected = float(numpy.percentile(source, percent))
        assert percentile(source, percent) == pytest.approx(expected)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://a:8000", Target("a", 8000, False, "")),
        ("http://a/v1/", Target("a", 80, False, "")),
        ("https://a/deep/v1", Target("a", 443, True, "/deep")),
    ],
)
def test_urls(url: str, target: Target) -> None:
    assert Target.parse(url) == target


def test_bodies_ask_for_exact_lengths() -> None:
    body = bodies(options("http://a"))[0]
    assert body["ignore_eos"] is True
    assert body["temperature"] == 0.0
