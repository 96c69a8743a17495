"""transformers on the same checkpoint and the same cores, one request after another.

A process of its own (`python -m bench.serving.transformers_reference`): a `Work` as JSON on stdin,
a `Measured` as JSON on stdout.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path

import msgspec
import torch
from transformers import DeepseekV3ForCausalLM

from bench.serving.plain_checkpoint import write_plain
from bench.serving.work import Measured, Prefilled, Work

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
        _generate(model, prompts[0], 2)
        _set_best_threads(lambda: _generate(model, prompts[0], _TRIAL_TOKENS))
        began = time.perf_counter()
        token_ids = [_generate(model, prompt, work.output_tokens) for prompt in work.generate]
        seconds = time.perf_counter() - began
        prefilled = []
        for _, of_length in groupby(work.prefill, key=len):
            same = list(of_length)
            _set_best_threads(partial(_prefill, model, same[0]))
            prefilled += [_prefill(model, prompt) for prompt in same]
    return Measured(generate_seconds=seconds, token_ids=token_ids, prefill=prefilled)


def _set_best_threads(call: Callable[[], object]) -> None:
    """One or all, whichever `call` takes less time with."""
    seconds = {}
    for count in {1, len(os.sched_getaffinity(0))}:
        torch.set_num_threads(count)
        began = time.perf_counter()
        call()
        seconds[count] = time.perf_counter() - began
    torch.set_num_threads(min(seconds, key=seconds.__getitem__))


def _generate(model: DeepseekV3ForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens after the prompt, exactly so many."""
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


def _prefill(model: DeepseekV3ForCausalLM, prompt: list[int]) -> Prefilled:
    """Times of the prompt's forward pass and of one step after it."""
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
