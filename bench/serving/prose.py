"""Prompts of made-up words."""

import random
from itertools import accumulate

_STARTS = (*"bcdfghjklmnprstvw", "ch", "sh", "st", "th", "tr")
_ENDS = (*"aeiou", "an", "ea", "er", "in", "or")
_NUM_WORDS = 50_000


def prose_prompts(seed: int, num_prompts: int, num_words: int) -> list[str]:
    """Made-up words, as often as Zipf's law has those of a language: most of a text are words
    that are everywhere, and some stand in no other."""
    source = random.Random(f"epserve-bench-prose-{seed}-{num_words}")
    syllables = [start + end for start in _STARTS for end in _ENDS]
    words = ["".join(source.choices(syllables, k=source.randint(1, 4))) for _ in range(_NUM_WORDS)]
    weights = list(accumulate(1 / (rank + 2.7) for rank in range(1, _NUM_WORDS + 1)))
    return [
        " ".join(
            word + source.choice(("", "", "", "", "", "", "", ",", "."))
            for word in source.choices(words, cum_weights=weights, k=num_words)
        )
        for _ in range(num_prompts)
    ]
