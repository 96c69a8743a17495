"""The whole cluster on GPUs: right answers in BF16, KV written from GPU memory to GPU memory.

With one GPU the prefill and the decode rank share it; with two each has its own.
"""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from demo_model.training.corpus import evaluation_set
from demo_model.training.evaluate import score, server_answerer
from proto import worker_pb2
from tests.cluster.harness import Cluster

pytestmark = [pytest.mark.gpu, pytest.mark.cluster, pytest.mark.timeout(400)]

NUM_QUESTIONS = 200
TELL_SECONDS = 5.0


@contextmanager
def told(log_dir: Path) -> Iterator[None]:
    """Prints what workers log last, while it changes: a first start compiles for minutes."""
    over = threading.Event()

    def tell() -> None:
        began = time.monotonic()
        last: dict[Path, str] = {}
        while not over.wait(TELL_SECONDS):
            for log in sorted(log_dir.rglob("*.log")):
                lines = log.read_text(errors="replace").splitlines()
                if lines and last.get(log) != lines[-1]:
                    last[log] = lines[-1]
                    say(f"{time.monotonic() - began:4.0f} s {log.stem}: {lines[-1][:140]}")

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - shown with -s


def kv_bytes(cluster: Cluster) -> float:
    """KV received by all decode workers, in bytes, from their /metrics."""
    total = 0.0
    for address in re.findall(r"decode-\d+ .*?http://(\S+)/metrics", cluster.output()):
        for line in httpx.get(f"http://{address}/metrics").text.splitlines():
            if line.startswith("epserve_kv_transfer_bytes_total"):
                total += float(line.rsplit(" ", 1)[1])
    return total


def devices(cluster: Cluster, role: "worker_pb2.Role.ValueType") -> set[str]:
    return {rank.device for worker in cluster.workers(role) for rank in worker.ranks}


def check_answers(cluster: Cluster) -> None:
    result = score(evaluation_set(NUM_QUESTIONS), server_answerer(cluster.url, cluster.model))
    say(f"{result.num_right} of {result.num_asked} right")
    assert result.num_right >= 0.99 * result.num_asked, result.misses
    assert kv_bytes(cluster) > 0
    cluster.assert_nothing_held()


def test_one_prefill_and_one_decode_rank(tmp_path: Path) -> None:
    options = ["--device", "cuda", "--dtype", "bfloat16", "--decode-ranks", "1"]
    with told(tmp_path), Cluster(tmp_path, *options) as cluster:
        prefill = devices(cluster, worker_pb2.ROLE_PREFILL)
        decode = devices(cluster, worker_pb2.ROLE_DECODE)
        assert prefill == {"cuda:0"}
        assert decode == {"cuda:0" if torch.cuda.device_count() == 1 else "cuda:1"}
        check_answers(cluster)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks of a worker need two GPUs")
def test_two_decode_ranks_with_nccl(tmp_path: Path) -> None:
    options = ["--device", "cuda", "--dtype", "bfloat16", "--decode-ranks", "2"]
    with told(tmp_path), Cluster(tmp_path, *options) as cluster:
        assert devices(cluster, worker_pb2.ROLE_DECODE) == {"cuda:0", "cuda:1"}
        check_answers(cluster)
