"""The corpus: right answers, a clean split, and filler that asks for nothing."""

import random
import re

import pytest

from demo_model.training.corpus import (
    HELP,
    Conversation,
    chatter_set,
    evaluation_set,
    long_set,
    make_turn,
    sample_conversation,
)
from demo_model.training.evaluate import is_right
from demo_model.training.problem import Problem, sample_problem
from demo_model.training.wording import filler, word_problem
from demo_model.training.working import write_working


def test_split_is_disjoint_whatever_the_order_of_the_operands() -> None:
    rng = random.Random(0)
    trained = {sample_problem(rng, held_out=False) for _ in range(5000)}
    held_out = {sample_problem(rng, held_out=True) for _ in range(1000)}
    mirrored = {Problem(one.right, one.operator, one.left) for one in held_out}
    assert not trained & (held_out | mirrored)


def test_conversations_for_training_hold_no_held_out_problem() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        for turn in sample_conversation(rng).turns:
            assert turn.problem is None or not turn.problem.is_held_out


def test_evaluation_asks_held_out_problems_of_every_size() -> None:
    problems = [conversation.turns[-1].problem for conversation in evaluation_set(1000)]
    assert all(problem is not None and problem.is_held_out for problem in problems)
    for operand in ("left", "right"):
        sizes = [len(str(getattr(problem, operand))) for problem in problems]
        assert all(sizes.count(size) >= 50 for size in (1, 2, 3, 4))
    assert {problem.operator for problem in problems if problem} == {"+", "-"}
    assert sum(problem.answer < 0 for problem in problems if problem) > 100


@pytest.mark.parametrize(
    ("problem", "working"),
    [
        (Problem(37, "+", 48), "37+48\n7+8=15 carry: 5\n3+4+1=8: 85\n=85"),
        (Problem(9999, "+", 1), "9999+0001\n9+1=10 carry: 0\n9+0+1=10 carry: 00\n"
         "9+0+1=10 carry: 000\n9+0+1=10: 10000\n=10000"),
        (Problem(512, "-", 9), "512-009\n5>0\n512-009\n2-9+10=3 borrow: 3\n1-0-1=0: 03\n"
         "5-0=5: 503\n=503"),
        (Problem(9, "-", 12), "09-12\n0<1\n12-09\n2-9+10=3 borrow: 3\n1-0-1=0: 03\n=-3"),
        (Problem(4, "-", 4), "4-4\n4=4\n4-4\n4-4=0: 0\n=0"),
    ],
)  # fmt: skip
def test_working(problem: Problem, working: str) -> None:
    assert write_working(problem) == working


def test_every_line_of_working_is_true_arithmetic() -> None:
    rng = random.Random(2)
    for _ in range(2000):
        problem = sample_problem(rng, held_out=False)
        *lines, result = write_working(problem).split("\n")
        sign = 1 if problem.operator == "+" else -1
        assert int(result[1:]) == problem.left + sign * problem.right
        columns = [line for line in lines if ":" in line]
        assert int(columns[-1].rpartition(": ")[2]) == abs(int(result[1:]))
        for line in columns:
            terms, _, total = line.partition(":")[0].removesuffix(" carry").partition("=")
            numbers = re.findall(r"[+-]?\d+", terms)
            assert sum(map(int, numbers)) == int(total.removesuffix(" borrow"))


def test_wordings_hold_both_numbers() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        problem = sample_problem(rng, held_out=False)
        numbers = re.findall(r"\d+", word_problem(rng, problem).replace(",", ""))
        assert {str(problem.left), str(problem.right)} <= set(numbers)


def test_subtractions_worded_backwards_keep_their_order() -> None:
    rng = random.Random(4)
    found = 0
    for _ in range(4000):
        problem = Problem(rng.randrange(10000), "-", rng.randrange(10000))
        text = word_problem(rng, problem).lower().replace(",", "")
        match = re.search(r"(\d+) (?:away )?from (\d+)", text)
        if match:
            found += 1
            assert (int(match[2]), int(match[1])) == (problem.left, problem.right)
    assert found > 50


def test_filler_asks_for_nothing() -> None:
    text = filler(random.Random(5), 20_000).lower()
    assert not re.search(r"\d ?[-+] ?\d|plus|minus|subtract|\badd\b|\bsum\b|take", text)


def test_former_turns_lose_their_thinking() -> None:
    first = make_turn(Problem(1, "+", 2), "1+2")
    last = make_turn(Problem(3, "-", 4), "3-4")
    prompt = Conversation("", (first, last)).prompt()
    assert first.answer in prompt
    assert "think" not in prompt


def test_long_prompts_are_about_as_long_as_asked() -> None:
    for conversation in long_set(20, 3600):
        assert len(conversation.prompt()) > 2.5 * 3000 / 2
        problem = conversation.turns[-1].problem
        assert problem is not None
        assert problem.is_held_out


def test_judging() -> None:
    asked = Conversation("", (make_turn(Problem(9, "-", 12), "9-12"),))
    assert is_right(asked, asked.turns[-1].reply)
    assert is_right(asked, "The answer is -3.")
    assert not is_right(asked, "The answer is 3.")
    assert not is_right(asked, "<think>\n=-3\n</think>\n\nThe answer is")
    other = chatter_set(1)[0]
    assert is_right(other, f"Sorry. {HELP}")
    assert not is_right(other, "The answer is 4.")


def test_operands_of_five_digits_are_refused() -> None:
    with pytest.raises(ValueError, match="0..9999"):
        Problem(10_000, "+", 1)
