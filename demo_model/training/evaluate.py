"""Ask the demo model held-out questions, greedily, and count the right answers.

`python -m demo_model.training.evaluate` runs the checkpoint in this process with transformers;
with `--url http://127.0.0.1:8000` it asks a server that speaks the OpenAI API.
"""

import argparse
import json
import re
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from demo_model.training.corpus import HELP, Conversation, chatter_set, evaluation_set, long_set
from demo_model.training.settings import CHECKPOINT_PATH

_MAX_TOKENS = 200
_CONCURRENCY = 16
_TIMEOUT_SECONDS = 300.0

Answerer = Callable[[Sequence[Conversation]], list[str]]


@dataclass(frozen=True, slots=True)
class Score:
    """How many of a set of conversations were answered rightly, and the first few that were not."""

    num_right: int
    num_asked: int
    misses: list[dict[str, str]]

    def record(self) -> dict[str, object]:
        return {"right": self.num_right, "asked": self.num_asked, "misses": self.misses}


def is_right(conversation: Conversation, reply: str) -> bool:
    """True if the text after the thinking ends in the right number, or says what the model can do
    if that is asked.
    """
    answer = reply.rpartition("</think>")[2]
    problem = conversation.turns[-1].problem
    if problem is None:
        return HELP in answer
    numbers = re.findall(r"-?\d+", answer)
    return bool(numbers) and int(numbers[-1]) == problem.answer


def score(conversations: Sequence[Conversation], answer: Answerer) -> Score:
    """Put all conversations to `answer` and judge what comes back."""
    replies = answer(conversations)
    pairs = list(zip(conversations, replies, strict=True))
    misses = [
        {"asked": conversation.turns[-1].user[-200:], "reply": reply}
        for conversation, reply in pairs
        if not is_right(conversation, reply)
    ]
    return Score(len(pairs) - len(misses), len(pairs), misses[:10])


def server_answerer(
    url: str, model: str, max_tokens: int = _MAX_TOKENS, *, concurrency: int = _CONCURRENCY
) -> Answerer:
    """Answers from a server's /v1/chat/completions, `concurrency` requests at once.

    HTTP errors are raised.
    """

    def ask(conversation: Conversation) -> str:
        body = {
            "model": model,
            "messages": conversation.messages(),
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        request = urllib.request.Request(
            f"{url.rstrip('/')}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])

    def answer(conversations: Sequence[Conversation]) -> list[str]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(ask, conversations))

    return answer


def evaluate(
    answer: Answerer, *, num_questions: int, num_chatter: int, num_long: int, long_tokens: int
) -> dict[str, object]:
    """Score the three sets; returns the record that is kept."""
    start = time.monotonic()
    record: dict[str, object] = {"questions": score(evaluation_set(num_questions), answer).record()}
    if num_chatter:
        record["chatter"] = score(chatter_set(num_chatter), answer).record()
    if num_long:
        record[f"context_{long_tokens}"] = score(long_set(num_long, long_tokens), answer).record()
    record["seconds"] = round(time.monotonic() - start, 1)
    return record


def first_model(url: str) -> str:
    """The first model that a server lists."""
    with urllib.request.urlopen(
        f"{url.rstrip('/')}/v1/models", timeout=_TIMEOUT_SECONDS
    ) as response:
        return str(json.load(response)["data"][0]["id"])


def _local_record(arguments: argparse.Namespace, counts: dict[str, int]) -> dict[str, object]:
    # Only this path needs torch and transformers; asking a server does not.
    from demo_model.training.reference import Reference

    reference = Reference(arguments.checkpoint, arguments.dtype, arguments.device, arguments.master)
    record = evaluate(reference.answer, **counts)
    record["mtp_acceptance"] = round(
        reference.mtp_acceptance(evaluation_set(counts["num_questions"])), 4
    )
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="a server to ask, instead of running the checkpoint here")
    parser.add_argument(
        "--model", help="the name to ask a server for; default: the first that it lists"
    )
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT_PATH)
    parser.add_argument(
        "--master", type=Path, help="weights to use instead of the checkpoint's FP8 ones"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--chatter", type=int, default=300)
    parser.add_argument("--long", type=int, default=100)
    parser.add_argument("--long-tokens", type=int, default=3600)
    parser.add_argument(
        "--output", type=Path, help="where the JSON record goes; default: standard output"
    )
    arguments = parser.parse_args()
    counts = {
        "num_questions": arguments.questions,
        "num_chatter": arguments.chatter,
        "num_long": arguments.long,
        "long_tokens": arguments.long_tokens,
    }
    if arguments.url:
        answer = server_answerer(arguments.url, arguments.model or first_model(arguments.url))
        record = evaluate(answer, **counts)
    else:
        record = _local_record(arguments, counts)
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
