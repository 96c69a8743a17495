"""Steps launched ahead of their results, in a whole cluster: answers, aborts and moves of experts
are what they are without."""

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proto import experts_pb2
from tests.cluster.harness import Cluster
from tests.cluster.test_aborts import leave_all
from tests.cluster.test_equality import check, expectations
from tests.cluster.test_rebalance import Operator

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

OVERLAP = ("--set", "decode.overlap-schedule=true")
NUM_LEFT, NUM_CHECKED = 40, 24


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    replicas = ("--set", "decode.num-redundant-experts=4")
    folder = Path(tmp_path_factory.mktemp("overlap"))
    with Cluster(folder, "--decode-ranks", "2", *OVERLAP, *replicas) as running:
        logs = [path.read_text(errors="replace") for path in folder.glob("*decode*")]
        assert any("overlapped=True" in text for text in logs), logs
        yield running


def test_answers_while_others_leave_and_experts_move(cluster: Cluster) -> None:
    operator, rng = Operator(cluster), random.Random(5)
    with ThreadPoolExecutor(20) as pool:
        left = pool.submit(lambda: asyncio.run(leave_all(cluster, NUM_LEFT)))
        checks = [pool.submit(check, cluster, one) for one in expectations(NUM_CHECKED)]
        for _ in range(2):
            last = list(operator.apply(operator.shuffled(rng)))[-1]
            assert last.phase == experts_pb2.RebalanceProgress.PHASE_DONE
        for one in checks:
            one.result(300)
        assert len(left.result(300)) == NUM_LEFT
    cluster.assert_nothing_held()


def test_what_hangs_on_the_token_before(cluster: Cluster) -> None:
    """Rules about the tokens so far, next to requests that have none: as alone."""
    prompt = list(range(20, 60))
    rules = [
        {"frequency_penalty": 0.8, "repetition_penalty": 1.2},
        {"guided_regex": "[0-9]{3,9}"},
        {"logprobs": 2, "temperature": 0.7, "seed": 3},
        {},
    ]
    asked = [rule | {"ignore_eos": True} for rule in rules if "guided_regex" not in rule]
    asked.append(rules[1])
    alone = [cluster.complete(prompt, 20, **fields)["choices"][0] for fields in asked]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda fields: cluster.complete(prompt, 20, **fields), asked * 4))
    for reply, choice in zip(together, alone * 4, strict=True):
        assert reply["choices"][0]["text"] == choice["text"]
        assert reply["choices"][0]["finish_reason"] == choice["finish_reason"]
    cluster.assert_nothing_held()
