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

MAX_TOKENS = 4
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


def prefill_workers(cluster: Cluster) -> list[worker_pb2.WorkerStatus]:
    """Those that take requests."""
    return [worker for worker in cluster.workers(worker_pb2.ROLE_PREFILL) if worker.ready]


def kill_during(
    cluster: Cluster, seed: int, delay: float, *, others_too: bool = False
) -> tuple[list[int], httpx.Response]:
    """Sends a prompt, and kills the worker that took it `delay` s after it began computing, or all
    prefill workers; the prompt, and the reply."""
    with ThreadPoolExecutor(1) as pool:
        for attempt in itertools.count():
            prompt = long_prompt(seed + 1000 * attempt)
            future = pool.submit(ask, cluster, prompt)
            victim = wait_until(
                lambda future=future: busy_prefill(cluster) or future.done(), 60, "work for prefill"
            )
            if victim is not True:  # else it was done before anybody looked
                break
        victims = prefill_workers(cluster) if others_too else [victim]
        threading.Event().wait(delay)
        for one in victims:
            cluster.kill(one)
        return prompt, future.result(120)


def kill_one_of_two(cluster: Cluster, delay: float) -> None:
    """The other one takes over; the killed one comes back, and holds nothing."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    prompt, reply = kill_during(cluster, int(delay * 100), delay)
    assert reply.status_code == 200, reply.text
    tokens = greedy(prompt, MAX_TOKENS)
    assert reply.json()["choices"][0]["text"] == tokenizer.decode(tokens)
    wait_until(lambda: len(prefill_workers(cluster)) == 2, 120, "both are back")
    cluster.assert_nothing_held()


# With chunks of 64 tokens a prompt is computed and its layers written for most of a
# second: the later kills fall into a transfer that has begun.
OPTIONS = ("--prefill-workers", "2", "--chunk-tokens", "64")


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.4])
def test_another_prefill_worker_takes_over(tmp_path: Path, delay: float) -> None:
    with Cluster(tmp_path, *OPTIONS) as cluster:
        kill_one_of_two(cluster, delay)


def test_one_prefill_worker_and_then_all(tmp_path: Path) -> None:
    with Cluster(tmp_path, *OPTIONS) as cluster:
        kill_one_of_two(cluster, 0.25)
        _, reply = kill_during(cluster, 1, 0.2, others_too=True)
        assert reply.status_code in (200, 503), reply.text
        if reply.status_code == 503:
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["message"]
        wait_until(cluster.is_ready, 120, "a worker restarted")
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
