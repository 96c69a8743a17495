"""A prefill worker killed under a request: another one takes it, or a quick 503; no leaks."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
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


def ask(cluster: Cluster, prompt: list[int]) -> httpx.Response:
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": MAX_TOKENS}
    return cluster.client.post("/v1/completions", json=body | {"temperature": 0})


def busy_prefill(cluster: Cluster) -> Any:
    """The prefill worker that computes something just now, or None."""
    for worker in cluster.workers(worker_pb2.ROLE_PREFILL):
        if any(rank.num_running for rank in worker.ranks):
            return worker
    return None


def kill_during(cluster: Cluster, seed: int, delay: float) -> tuple[list[int], httpx.Response]:
    """Sends a prompt, and kills the worker that took it `delay` s after it began computing; the
    prompt, and the reply."""
    with ThreadPoolExecutor(1) as pool:
        for attempt in itertools.count():
            prompt = long_prompt(seed + 1000 * attempt)
            future = pool.submit(ask, cluster, prompt)
            victim = wait_until(
                lambda future=future: busy_prefill(cluster) or future.done(), 60, "work for prefill"
            )
            if victim is not True:  # else it was done before anybody looked
                break
        threading.Event().wait(delay)
        cluster.kill(victim)
        return prompt, future.result(120)


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
    with Cluster(tmp_path, "--prefill-workers", "2", "--chunk-tokens", "64") as cluster:
        prompt, reply = kill_during(cluster, int(delay * 100), delay)
        assert reply.status_code == 200, reply.text
        tokens = greedy(prompt, MAX_TOKENS)
        assert reply.json()["choices"][0]["text"] == tokenizer.decode(tokens)
        cluster.assert_nothing_held()  # the killed worker is back, and holds nothing


def test_the_only_prefill_worker(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--chunk-tokens", "64") as cluster:
        _, reply = kill_during(cluster, 1, 0.2)
        assert reply.status_code in (200, 503), reply.text
        if reply.status_code == 503:
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["message"]
        wait_until(cluster.is_ready, 120, "the worker restarted")
        wait_until(lambda: ask(cluster, [5, 6, 7]).status_code == 200, 120, "service again")
        cluster.assert_nothing_held()


@pytest.mark.slow  # with many streams at once: tests/cluster/test_failover.py
@pytest.mark.parametrize(
    "schedule", ["decode.overlap-schedule=false", "decode.overlap-schedule=true"]
)
def test_decode_worker_killed_in_mid_answer(tmp_path: Path, schedule: str) -> None:
    """With a second decode worker the answer is complete and exact."""
    prompt = long_prompt(seed=3)[:100]
    options = ["--decode-workers", "2", "--decode-ranks", "1", "--set", schedule]
    with Cluster(tmp_path, *options) as cluster:
        body = {"prompt": prompt, "max_tokens": 600, "ignore_eos": True}
        undisturbed = cluster.complete(prompt, 600, ignore_eos=True)["choices"][0]["text"]
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(cluster.complete, prompt, 600, ignore_eos=True)

            def busy() -> Any:
                for worker in cluster.workers(worker_pb2.ROLE_DECODE):
                    if any(rank.num_running for rank in worker.ranks):
                        return worker
                return None

            victim = wait_until(busy, 60, f"a busy decode worker for {body}")
            cluster.kill(victim)
            assert future.result(120)["choices"][0]["text"] == undisturbed
        cluster.assert_nothing_held()
