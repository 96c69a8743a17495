"""Questions that the demo model is trained to answer: one addition or one subtraction.

The split between training and evaluation is made here, on the numbers and the operator alone, so
that no wording of a held-out question is ever trained on, nor the same numbers in the other order.
"""

import hashlib
import random
from dataclasses import dataclass
from typing import Literal

MAX_DIGITS = 4
_HELD_OUT_ONE_IN = 32


@dataclass(frozen=True, slots=True)
class Problem:
    """`left operator right`, both operands whole numbers of 0 to 9999."""

    left: int
    operator: Literal["+", "-"]
    right: int

    def __post_init__(self) -> None:
        limit = 10**MAX_DIGITS
        if not (0 <= self.left < limit and 0 <= self.right < limit):
            raise ValueError(f"operands must lie in 0..{limit - 1}: {self.left}, {self.right}")

    @property
    def answer(self) -> int:
        return self.left + self.right if self.operator == "+" else self.left - self.right

    @property
    def is_held_out(self) -> bool:
        """True for one unordered pair of operands in 32.

        For evaluation only, never for training.
        """
        low, high = sorted((self.left, self.right))
        digest = hashlib.blake2b(f"{low}{self.operator}{high}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") % _HELD_OUT_ONE_IN == 0


def sample_problem(rng: random.Random, *, held_out: bool) -> Problem:
    """Draw a problem from one side of the split, with long carries, near-equal numbers and zeros
    well represented.
    """
    while True:
        problem = _draw(rng)
        if problem.is_held_out == held_out:
            return problem


def _draw(rng: random.Random) -> Problem:
    operator: Literal["+", "-"] = "+" if rng.random() < 0.45 else "-"
    kind = rng.random()
    if kind < 0.5:
        left, right = _number(rng, rng.randint(1, 4)), _number(rng, rng.randint(1, 4))
    elif kind < 0.8:
        left, right = _number(rng, MAX_DIGITS), _number(rng, MAX_DIGITS)
    elif kind < 0.9:  # the first digits agree: comparing and borrowing have to look far
        left = _number(rng, rng.randint(2, 4))
        spread = 10 ** rng.randint(0, 3)
        right = min(max(left + rng.randint(-spread, spread), 0), 10**MAX_DIGITS - 1)
    else:  # nines and zeros: long carries and borrows
        left, right = _extreme_number(rng), _extreme_number(rng)
    return Problem(left, operator, right)


def _number(rng: random.Random, num_digits: int) -> int:
    low = 0 if num_digits == 1 else 10 ** (num_digits - 1)
    return rng.randrange(low, 10**num_digits)


def _extreme_number(rng: random.Random) -> int:
    digits = [rng.choice("0099159") for _ in range(rng.randint(1, MAX_DIGITS))]
    return int("".join(digits))
