"""The demo model with int4 experts, quantized as an operator does it, through a whole cluster."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from demo_model.training.evaluate import evaluate, server_answerer
from tests.cluster.harness import DEMO_MODEL, REPOSITORY, Cluster
from tests.cluster.test_rebalance import NUM_REDUNDANT, Clients, Operator, by_rank

pytestmark = pytest.mark.cluster

# In FP32 and as shipped it answers all of them.
LARGEST_LOSS = 0.02


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("w4a8") / "demo-w4afp8"
    command = [sys.executable, "-m", "ctl", "quantize", "--format", "w4afp8"]
    command += ["--model", str(DEMO_MODEL), "--output", str(folder)]
    subprocess.run(command, check=True, cwd=REPOSITORY, timeout=400)
    return folder


def check(model: Path, folder: Path, *options: str, num_questions: int, num_chatter: int) -> None:
    with Cluster(folder, *options, model=model) as cluster:
        record = evaluate(
            server_answerer(cluster.url, cluster.model),
            num_questions=num_questions,
            num_chatter=num_chatter,
            num_long=0,
            long_tokens=0,
        )
        cluster.assert_nothing_held()
    for kind in ("questions", "chatter"):
        scored = record[kind]
        assert isinstance(scored, dict)
        assert scored["right"] >= (1 - LARGEST_LOSS) * scored["asked"], record


def test_answers(model: Path, tmp_path: Path) -> None:
    check(model, tmp_path, num_questions=32, num_chatter=8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_answers_of_many_over_ranks(model: Path, tmp_path: Path) -> None:
    check(
        model,
        tmp_path,
        *("--prefill-ranks", "2", "--decode-ranks", "2"),
        *("--set", "decode.num-redundant-experts=8"),
        num_questions=1000,
        num_chatter=100,
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_answers_stay_while_experts_move(model: Path, tmp_path: Path) -> None:
    options = ("--decode-ranks", "4", "--set", f"decode.num-redundant-experts={NUM_REDUNDANT}")
    with Cluster(tmp_path, *options, model=model) as cluster:
        operator, rng = Operator(cluster), random.Random(3)
        with Clients(cluster) as clients:
            for _ in range(4):
                plan = operator.shuffled(rng)
                assert list(operator.apply(plan))[-1].num_bytes_done > 0
                assert by_rank(operator.load()) == by_rank(plan)
        assert not clients.refusals
        cluster.assert_nothing_held()
