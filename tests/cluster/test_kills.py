"""A prefill worker killed under a request: another one takes it, or a quick 503; no leaks."""

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from proto import worker_pb2
from tests.cluster.harness import DEMO_MODEL, Cluster, wait_until
from tests.cluster.reference import greedy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MAX_TOKENS = 8
PROMPT_TOKENS = 3000


def long_prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(PROMPT_TOKENS)]


def ask(cluster: Cluster, prompt: list[int]) -> tuple[httpx.Response, float]:
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": MAX_TOKENS}
    start = time.monotonic()
    reply = cluster.client.post("/v1/completions", json=body | {"temperature": 0})
    return reply, time.monotonic() - start


def busy_prefill(cluster: Cluster) -> Any:
    """The prefill worker that computes something just now, or None."""
    for worker in cluster.workers(worker_pb2.ROLE_PREFILL):
        if any(rank.num_running for rank in worker.ranks):
            return worker
    return None


def kill_during(cluster: Cluster, prompt: list[int], delay: float) -> Future[Any]:
    """Sends `prompt`, and kills the worker that took it `delay` s after it began computing."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask, cluster, prompt)
        victim = wait_until(lambda: busy_prefill(cluster), 10, "a busy prefill worker")
        threading.Event().wait(delay)
        cluster.kill(victim)
        killed_at = time.monotonic()
        future.result(60)
    future.seconds_after_kill = time.monotonic() - killed_at  # type: ignore[attr-defined]
    return future


# With chunks of 64 tokens a prompt is computed and its layers written for most of a
# second: the later kills fall into a transfer that has begun.
@pytest.mark.parametrize(
    "delay",
    [
        0.25,
        pytest.param(0.0, marks=pytest.mark.slow),
        pytest.param(0.1, marks=pytest.mark.slow),
        pytest.param(0.4, marks=pytest.mark.slow),
    ],
)
def test_another_prefill_worker_takes_over(tmp_path: Path, delay: float) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    prompt = long_prompt(seed=int(delay * 100))
    tokens = greedy(prompt, MAX_TOKENS)
    with Cluster(tmp_path, "--prefill-workers", "2", "--chunk-tokens", "64") as cluster:
        reply, _ = kill_during(cluster, prompt, delay).result()
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["text"] == tokenizer.decode(tokens)
        cluster.assert_nothing_held(20)  # the killed worker is back, and holds nothing


def test_the_only_prefill_worker(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--chunk-tokens", "64") as cluster:
        future = kill_during(cluster, long_prompt(seed=1), 0.2)
        reply, _ = future.result()
        assert reply.status_code in (200, 503), reply.text
        if reply.status_code == 503:
            assert future.seconds_after_kill < 2  # type: ignore[attr-defined]
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["message"]
        wait_until(cluster.is_ready, 30, "the worker restarted")
        wait_until(lambda: ask(cluster, [5, 6, 7])[0].status_code == 200, 10, "service again")
        cluster.assert_nothing_held(20)


def test_decode_worker_killed_in_mid_answer(tmp_path: Path) -> None:
    """With a second decode worker the answer is complete and exact."""
    prompt = long_prompt(seed=3)[:100]
    with Cluster(tmp_path, "--decode-workers", "2", "--decode-ranks", "1") as cluster:
        body = {"prompt": prompt, "max_tokens": 600, "ignore_eos": True}
        undisturbed = cluster.complete(prompt, 600, ignore_eos=True)["choices"][0]["text"]
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(cluster.complete, prompt, 600, ignore_eos=True)

            def busy() -> Any:
                for worker in cluster.workers(worker_pb2.ROLE_DECODE):
                    if any(rank.num_running for rank in worker.ranks):
                        return worker
                return None

            victim = wait_until(busy, 10, f"a busy decode worker for {body}")
            cluster.kill(victim)
            assert future.result(60)["choices"][0]["text"] == undisturbed
        cluster.assert_nothing_held(20)
