"""Greedy output of the whole cluster equals the single-process transformers reference."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ep.placement.placement import EMPTY, Placement
from tests.cluster.harness import DEMO_MODEL, Cluster
from tests.cluster.reference import greedy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NUM_IN_SHORT, NUM_PROMPTS = 24, 50
MAX_TOKENS = 24


@dataclass(frozen=True)
class Expected:
    prompt: tuple[int, ...]
    text: str
    num_tokens: int
    finish_reason: str


@cache
def expectations(num_prompts: int = NUM_PROMPTS) -> tuple[Expected, ...]:
    """Half are questions as a chat client sends them, half arbitrary tokens, 1 to 300 long."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    eos = config["eos_token_id"]
    eos_ids = set(eos if isinstance(eos, list) else [eos])
    rng = random.Random(7)
    prompts: list[list[int]] = []
    for index in range(num_prompts):
        if index % 2:
            a, b = rng.randrange(10_000), rng.randrange(10_000)
            prompts.append(tokenizer.encode(f"What is {a} {rng.choice('+-')} {b}?").ids)
        else:
            length = rng.choice((1, 2, 63, 64, 65, 128, 129, rng.randint(1, 300)))
            prompts.append([rng.randrange(3, tokenizer.get_vocab_size()) for _ in range(length)])
    result = []
    for prompt in prompts:
        tokens = greedy(prompt, MAX_TOKENS)
        ended = tokens[-1] in eos_ids
        result.append(
            Expected(
                prompt=tuple(prompt),
                text=tokenizer.decode(
                    [t for t in tokens if t not in eos_ids], skip_special_tokens=True
                ),
                num_tokens=len(tokens),
                finish_reason="stop" if ended else "length",
            )
        )
    return tuple(result)


def check(cluster: Cluster, expected: Expected) -> int:
    """Cached prompt tokens of the reply, which must be the expected one."""
    reply = cluster.complete(list(expected.prompt), MAX_TOKENS)
    choice, usage = reply["choices"][0], reply["usage"]
    got = (choice["text"], usage["completion_tokens"], choice["finish_reason"])
    assert got == (expected.text, expected.num_tokens, expected.finish_reason)
    assert usage["prompt_tokens"] == len(expected.prompt)
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("num_prompts", "prefill_workers", "prefill_ranks", "decode_workers", "decode_ranks",
     "chunk_tokens", "drafts"),
    [
        (NUM_IN_SHORT, 1, 1, 1, 2, 64, 2),
        pytest.param(NUM_PROMPTS, 1, 1, 1, 2, 64, 0, marks=pytest.mark.slow),
        pytest.param(NUM_PROMPTS, 1, 1, 1, 1, 2048, 0, marks=pytest.mark.slow),
        pytest.param(NUM_PROMPTS, 2, 1, 1, 2, 2048, 0, marks=pytest.mark.slow),
        pytest.param(NUM_PROMPTS, 1, 2, 2, 1, 128, 0, marks=pytest.mark.slow),
        pytest.param(NUM_PROMPTS, 1, 1, 1, 4, 64, 0, marks=pytest.mark.slow),
        pytest.param(NUM_PROMPTS, 1, 1, 1, 1, 2048, 3, marks=pytest.mark.slow),
        pytest.param(NUM_PROMPTS, 2, 1, 1, 2, 2048, 1, marks=pytest.mark.slow),
        pytest.param(NUM_PROMPTS, 1, 2, 2, 1, 128, 2, marks=pytest.mark.slow),
        pytest.param(NUM_PROMPTS, 1, 1, 1, 4, 64, 3, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_equals_transformers(
    tmp_path: Path,
    num_prompts: int,
    prefill_workers: int,
    prefill_ranks: int,
    decode_workers: int,
    decode_ranks: int,
    chunk_tokens: int,
    drafts: int,
) -> None:
    expected = expectations(num_prompts)
    options = ["--prefill-workers", str(prefill_workers), "--prefill-ranks", str(prefill_ranks)]
    options += ["--decode-workers", str(decode_workers), "--decode-ranks", str(decode_ranks)]
    options += ["--chunk-tokens", str(chunk_tokens), "--speculative-tokens", str(drafts)]
    with Cluster(tmp_path, *options) as cluster:
        for one in expected:  # alone, cold prefix cache
            check(cluster, one)
        with ThreadPoolExecutor(32) as pool:  # many at once, warm prefix cache
            cached = list(pool.map(lambda one: check(cluster, one), expected))
        # With one prefill worker each full page but the last token's was computed before.
        if prefill_workers == 1 and prefill_ranks == 1:
            assert cached == [(len(one.prompt) - 1) // 64 * 64 for one in expected]
        else:
            assert sum(cached) > 0
        cluster.assert_nothing_held()


@pytest.mark.slow
def test_gloo_moves_tensors_between_ranks_as_well(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--set", "decode.ep-backend=gloo") as cluster:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda one: check(cluster, one), expectations()))
        cluster.assert_nothing_held()


@pytest.mark.slow
@pytest.mark.parametrize("start", ["replicas", "file", "folded"])
def test_placement_of_experts_changes_no_token(tmp_path: Path, start: str) -> None:
    """Replicas in turn; a file with replicas, holes and another order in each layer; the shared
    expert as one of the routed."""
    file = tmp_path / "placement.json"
    trivial = Placement.trivial(3, 16, 4, num_redundant=8)
    rng = random.Random(3)
    spare = [*range(4), EMPTY, EMPTY, 3, 3]
    layers = {layer: tuple(rng.sample([*range(16), *spare], 24)) for layer in range(3)}
    file.write_text(trivial.with_layers(layers).as_json())
    flags = {
        "replicas": ["decode.num-redundant-experts=5", "prefill.num-redundant-experts=1"],
        "file": [f"decode.expert-placement={file}"],
        "folded": ["decode.shared-expert=folded", "prefill.shared-expert=folded"],
    }[start]
    options = [text for flag in flags for text in ("--set", flag)]
    with Cluster(tmp_path, "--prefill-ranks", "2", "--decode-ranks", "4", *options) as cluster:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda one: check(cluster, one), expectations()))
        cluster.assert_nothing_held()


@pytest.mark.slow
def test_many_at_once_on_a_cold_cache(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--chunk-tokens", "192") as cluster:
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(lambda one: check(cluster, one), expectations()))
        cluster.assert_nothing_held()


@pytest.mark.slow
def test_preemption_changes_no_token(tmp_path: Path) -> None:
    """A pool of a few pages a rank: requests are preempted and computed again."""
    options = ["--kv-pages", "14", "--max-model-len", "512", "--decode-ranks", "1"]
    with Cluster(tmp_path, *options) as cluster:
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(lambda one: check(cluster, one), expectations()))
        cluster.assert_nothing_held()
