"""lm-eval, unmodified, against a cluster: its scores are those of the benchmark of right answers.

It brings some 700 MB of packages, so it has an environment of its own: `make lm-eval`, as CI does.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from demo_model.training.corpus import Conversation, evaluation_set
from demo_model.training.evaluate import score, server_answerer
from tests.cluster.harness import DEMO_MODEL, Cluster

pytestmark = pytest.mark.cluster

TASKS = Path(__file__).parent / "lm_eval_tasks"
INSTALLED = Path(__file__).parents[2] / ".lm-eval" / "bin" / "lm_eval"
NUM_CHOICES = 3


@pytest.fixture(scope="module")
def lm_eval() -> str:
    found = shutil.which("lm_eval") or (str(INSTALLED) if INSTALLED.exists() else None)
    return found or pytest.skip("there is no lm_eval: `make lm-eval` installs it")


@pytest.fixture(scope="module")
def questions() -> list[Conversation]:
    """Those without a system prompt and former turns: a task has one text."""
    return [one for one in evaluation_set(100) if not one.system and len(one.turns) == 1][:32]


def metrics(
    lm_eval: str, cluster: Cluster, folder: Path, task: str, rows: list[dict[str, Any]], kind: str
) -> dict[str, Any]:
    """What lm-eval says of `task`, with `rows` as its data and nothing else to read."""
    shutil.copy(TASKS / f"demo_{task}.yaml", folder)
    (folder / f"{task}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = {"local-chat-completions": "chat/completions", "local-completions": "completions"}[kind]
    arguments = f"model={cluster.model},base_url={cluster.url}/v1/{path},num_concurrent=8"
    if kind == "local-completions":
        arguments += f",tokenizer={DEMO_MODEL}"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        [
            lm_eval, "run", "--model", kind, "--model_args", arguments, "--tasks", f"demo_{task}",
            "--include_path", str(folder), "--apply_chat_template", "--output_path", "out",
        ],
        cwd=folder, env=os.environ | offline, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path_of_results,) = (folder / "out").rglob("results_*.json")
    found: dict[str, Any] = json.loads(path_of_results.read_text())["results"][f"demo_{task}"]
    return found


@pytest.mark.parametrize("num_questions", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_generated_answers(
    lm_eval: str, served: Cluster, questions: list[Conversation], tmp_path: Path, num_questions: int
) -> None:
    questions = questions[:num_questions]
    rows = []
    for question in questions:
        problem = question.turns[-1].problem
        assert problem is not None
        rows.append({"question": question.turns[-1].user, "answer": problem.answer})
    # One question gets a wrong solution: not every score would do.
    rows[0]["answer"] += 1
    expected = score(questions, server_answerer(served.url, served.model))
    found = metrics(lm_eval, served, tmp_path, "sums", rows, "local-chat-completions")
    assert expected.num_right > len(rows) * 0.9
    assert found["exact_match,last-number"] == pytest.approx(
        (expected.num_right - 1) / expected.num_asked
    )


@pytest.mark.slow
def test_likelihoods(
    lm_eval: str, served: Cluster, questions: list[Conversation], tmp_path: Path
) -> None:
    rows = []
    for position, question in enumerate(questions):
        turn = question.turns[-1]
        assert turn.problem is not None
        right = position % NUM_CHOICES
        numbers = [turn.problem.answer + 3 * (place - right) for place in range(NUM_CHOICES)]
        choices = [turn.reply.replace(str(turn.problem.answer), str(one)) for one in numbers]
        rows.append({"question": turn.user, "choices": choices, "right": right})
    rows[0]["right"] = 1
    found = metrics(lm_eval, served, tmp_path, "choices", rows, "local-completions")
    assert found["acc,none"] == pytest.approx((len(rows) - 1) / len(rows))
