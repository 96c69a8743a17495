"""The judge: transformers in FP32 on the checkpoint that the cluster serves."""

from functools import cache

from demo_model.training.reference import Reference


@cache
def _reference() -> Reference:
    return Reference()


def greedy(prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy continuation of one prompt, alone, its end-of-sequence token included."""
    return _reference().generate([prompt], max_tokens)[0]
