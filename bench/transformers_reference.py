"""transformers on the same checkpoint and the same cores, one request after another.

A process of its own (`python -m bench.transformers_reference`): a `Work` as JSON on stdin, a
`Measured` as JSON on stdout. The only module of bench that needs torch and transformers.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from transformers import DeepseekV3ForCausalLM

from bench.plain_checkpoint import write_plain
from bench.work import Measured, Prefilled, Work

_TRIAL_TOKENS = 16


def main() -> None:
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    # Whatever libraries print must not get between the lines of the answer.
    answer, sys.stdout = sys.stdout, sys.stderr
    measured = measure(load(Path(work.model)), work)
    answer.write(msgspec.json.encode(measured).decode())
    answer.flush()  # at exit only sys.stdout is


def load(folder: Path) -> DeepseekV3ForCausalLM:
    """The checkpoint in FP32: CPUs have no FP8 kernels."""
    with tempfile.TemporaryDirectory(prefix="epserve-bench-") as name:
        plain = write_plain(folder, Path(name) / "plain", torch.float32)
        model = DeepseekV3ForCausalLM.from_pretrained(plain, dtype=torch.float32)
    return model.eval()


def measure(model: DeepseekV3ForCausalLM, work: Work) -> Measured:
    """Times everything once warm, each with the number of threads that suits it best: small
    steps are often faster with one thread than with all."""
    prompts = work.generate or work.prefill
    with torch.inference_mode():
        torch.set_num_threads(_best_thread_count(model, prompts[0]))
        began = time.perf_counter()
        token_ids = [_generate(model, prompt, work.output_tokens) for prompt in work.generate]
        seconds = time.perf_counter() - began
        prefilled = _prefill_all(model, work.prefill)
    return Measured(generate_seconds=seconds, token_ids=token_ids, prefill=prefilled)


def _thread_counts() -> list[int]:
    return sorted({1, len(os.sched_getaffinity(0))})


def _best_thread_count(model: DeepseekV3ForCausalLM, prompt: list[int]) -> int:
    """With which a prompt and some tokens behind it take the least time."""
    seconds = {}
    for count in _thread_counts():
        torch.set_num_threads(count)
        _generate(model, prompt, 2)
        began = time.perf_counter()
        _generate(model, prompt, _TRIAL_TOKENS)
        seconds[count] = time.perf_counter() - began
    return min(seconds, key=seconds.__getitem__)


def _generate(model: DeepseekV3ForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens behind the prompt, exactly so many."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def _prefill_all(model: DeepseekV3ForCausalLM, prompts: Sequence[list[int]]) -> list[Prefilled]:
    """Each prompt with the thread count that is fastest for its length."""
    best: dict[int, int] = {}
    measured = []
    for prompt in prompts:
        if len(prompt) not in best:
            seconds = {}
            for count in _thread_counts():
                torch.set_num_threads(count)
                seconds[count] = _prefill(model, prompt).prefill_seconds
            best[len(prompt)] = min(seconds, key=seconds.__getitem__)
        torch.set_num_threads(best[len(prompt)])
        measured.append(_prefill(model, prompt))
    return measured


def _prefill(model: DeepseekV3ForCausalLM, prompt: list[int]) -> Prefilled:
    """Times of the prompt's forward pass and of one step behind it."""
    began = time.perf_counter()
    output = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    first = output.logits[:, -1:].argmax(-1)
    between = time.perf_counter()
    model(first, past_key_values=output.past_key_values, use_cache=True)
    ended = time.perf_counter()
    return Prefilled(
        num_tokens=len(prompt), prefill_seconds=between - began, step_seconds=ended - between
    )


if __name__ == "__main__":
    main()
