"""The same requests give the same bytes, streamed or not, from one pair of workers and from four
that draft tokens besides.

Batches and chunks of another size round sums differently, which shows in the last digits of
log-probabilities. Requests that ask for them are therefore sent one by one, and these numbers
alone get a tolerance: what a worker finds in its prefix cache differs from cluster to cluster.
"""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proto import worker_pb2
from tests.cluster.event_stream import events, whole_reply
from tests.cluster.harness import SMALL_CHUNKS, Cluster
from tests.cluster.reply_shape import canonical, same_but_for_rounding, without_run
from tests.cluster.seeded_requests import SeededRequest, seeded_requests

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NUM_REQUESTS = 200
NUM_IN_SHORT = 40
NUM_AT_ONCE = 6

Answer = tuple[int, bytes]  # status and body
Answers = list[Answer]
Ask = Callable[[Cluster, SeededRequest], Answer]


@pytest.fixture(scope="module")
def clusters(
    served: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Cluster]]:
    """One pair of workers, and two and two that draft."""
    options = ["--prefill-workers", "2", "--decode-workers", "2", "--decode-ranks", "1"]
    options += [*SMALL_CHUNKS, "--speculative-tokens", "2"]
    with Cluster(Path(tmp_path_factory.mktemp("parity")), *options) as four:
        yield served, four


def whole(cluster: Cluster, request: SeededRequest) -> Answer:
    reply = cluster.client.post(request.path, json=request.body)
    return reply.status_code, reply.content


def streamed(cluster: Cluster, request: SeededRequest) -> Answer:
    """Put together again; an error as it came."""
    body = request.body | {"stream": True, "stream_options": {"include_usage": True}}
    reply = cluster.client.post(request.path, json=body)
    if reply.status_code != 200:
        return reply.status_code, reply.content
    return 200, json.dumps(whole_reply(events(reply.text))).encode()


def ask_all(cluster: Cluster, requests: list[SeededRequest], how: Ask) -> Answers:
    """In order; those without log-probabilities several at once."""
    alone = [index for index, one in enumerate(requests) if "logprobs" in one.body]
    others = sorted(set(range(len(requests))) - set(alone))
    replies: dict[int, Answer] = {i: how(cluster, requests[i]) for i in alone}
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        found = pool.map(lambda index: how(cluster, requests[index]), others)
        replies |= dict(zip(others, found, strict=True))
    return [replies[index] for index in range(len(requests))]


def plain(body: bytes) -> bytes:
    """One spelling of a reply; an empty content is as good as none."""
    reply = json.loads(body)
    for choice in reply.get("choices", ()):
        if "message" in choice:
            choice["message"]["content"] = choice["message"].get("content") or None
    return canonical(reply)


def check(request: SeededRequest, left: bytes, right: bytes) -> bool:
    """Whether they were equal to the byte; AssertionError when they may not even be rounded."""
    if left == right:
        return True
    say = f"{request.path} {json.dumps(request.body)}\n{left.decode()}\n{right.decode()}"
    assert "logprobs" in request.body, say
    assert same_but_for_rounding(json.loads(left), json.loads(right)), say
    return False


def answers(cluster: Cluster, requests: list[SeededRequest]) -> tuple[Answers, Answers]:
    """Whole and streamed."""
    return ask_all(cluster, requests, whole), ask_all(cluster, requests, streamed)


@pytest.mark.parametrize(
    "num_requests", [NUM_IN_SHORT, pytest.param(NUM_REQUESTS, marks=pytest.mark.slow)]
)
def test_every_shape_of_cluster_gives_the_same_bytes(
    clusters: tuple[Cluster, Cluster], capsys: pytest.CaptureFixture[str], num_requests: int
) -> None:
    requests = seeded_requests(num_requests, seed=5, model=clusters[0].model)
    with ThreadPoolExecutor(2) as pool:
        pair, four = pool.map(lambda cluster: answers(cluster, requests), clusters)
    num_equal = 0
    rows = zip(requests, pair[0], four[0], pair[1], four[1], strict=True)
    for request, first, second, *streams in rows:
        assert first[0] == second[0] == request.status, (request, first, second)
        equal = check(request, without_run(first[1]), without_run(second[1]))
        for status, body in streams if request.streamable else ():
            assert status == request.status, (request, body)
            equal &= check(request, plain(first[1]), plain(body))
        num_equal += equal
    num_refused = sum(request.status != 200 for request in requests)
    with capsys.disabled():
        sys.stdout.write(
            f"\nparity: {num_requests} requests, {num_refused} of them refused; "
            f"{num_equal} equal to the byte streamed and not from 1+1 and 2+2 workers, "
            f"{num_requests - num_equal} but for rounded log-probabilities\n"
        )


def test_all_workers_took_part(clusters: tuple[Cluster, Cluster]) -> None:
    """Otherwise the comparison above would be of one pair with another."""
    four = clusters[1]
    for role in (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE):
        accepted = [worker.num_accepted_total for worker in four.workers(role)]
        assert len(accepted) == 2
        assert min(accepted) >= NUM_IN_SHORT // 10, accepted
    for cluster in clusters:
        cluster.assert_nothing_held()
