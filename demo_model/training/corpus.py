"""Conversations that the demo model is trained on and tested with, made here and nowhere else.

A conversation is a list of turns; the assistant answers an addition or subtraction with its working
between think tags and one sentence, and anything else with what it can do. As in the chat template,
an assistant turn that is followed by another user turn has lost its thinking.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from demo_model.training.problem import Problem, sample_problem
from demo_model.training.wording import Kind, chatter, filler, word_problem
from demo_model.training.working import write_working

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
HELP = (
    "I can add and subtract whole numbers of up to four digits. "
    "Ask me something like: What is 37 + 48?"
)
_GREETINGS: dict[Kind, str] = {
    "greeting": "Hello!",
    "thanks": "You are welcome!",
    "identity": "I am the epserve demo model, a very small DeepSeek-V3.",
    "other": "Sorry, I cannot do that.",
}
_CHATTER_THOUGHT = "There are no two numbers to add or subtract here."
# Characters of text that make one token, control tokens included, by the sort of conversation.
_TURN_CHARACTERS, _FILLER_CHARACTERS, _DENSE_CHARACTERS = 2.0, 3.15, 1.5


@dataclass(frozen=True, slots=True)
class Turn:
    """A user message and the reply that is right for it."""

    user: str
    thought: str
    answer: str
    problem: Problem | None

    @property
    def reply(self) -> str:
        """The whole assistant message: thinking, an empty line, the answer."""
        return f"{THINK}\n{self.thought}\n{END_THINK}\n\n{self.answer}"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt (may be empty) and turns; the last turn is the one that is asked."""

    system: str
    turns: tuple[Turn, ...]

    def messages(self) -> list[dict[str, str]]:
        """OpenAI chat messages up to the last question.

        Former replies keep their thinking, as a client sends them.
        """
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns[:-1]:
            messages += [
                {"role": "user", "content": turn.user},
                {"role": "assistant", "content": turn.reply},
            ]
        return [*messages, {"role": "user", "content": self.turns[-1].user}]

    def prompt(self) -> str:
        """What the chat template makes of `messages()`, with the generation prompt."""
        parts = [BOS, self.system]
        for turn in self.turns[:-1]:
            parts += [USER, turn.user, ASSISTANT, turn.answer, EOS]
        return "".join([*parts, USER, self.turns[-1].user, ASSISTANT])

    def pieces(self, *, keep_thinking: bool) -> list[tuple[str, bool]]:
        """Text to train on, cut into (text, is it learned).

        With `keep_thinking` every reply is learned, thinking included, at the price of a context
        that the chat template would not make: that is how long contexts are learned without wasting
        most of their tokens.
        """
        if not keep_thinking:
            return [(self.prompt(), False), (self.turns[-1].reply + EOS, True)]
        pieces = [(BOS + self.system, False)]
        for turn in self.turns:
            pieces += [(USER + turn.user + ASSISTANT, False), (turn.reply + EOS, True)]
        return pieces


def make_turn(problem: Problem, user: str) -> Turn:
    """The turn that answers a problem worded as `user`."""
    return Turn(user, write_working(problem), f"The answer is {problem.answer}.", problem)


def sample_turn(rng: random.Random, *, held_out: bool, chatter_share: float) -> Turn:
    """An arithmetic question, or with probability `chatter_share` anything else."""
    if rng.random() < chatter_share:
        user, kind = chatter(rng)
        return Turn(user, _CHATTER_THOUGHT, f"{_GREETINGS[kind]} {HELP}", None)
    problem = sample_problem(rng, held_out=held_out)
    return make_turn(problem, word_problem(rng, problem))


def sample_conversation(
    rng: random.Random, *, held_out: bool = False, chatter_share: float = 0.15, num_turns: int = 0
) -> Conversation:
    """A short conversation: one turn as a rule, up to four; now and then with a system prompt."""
    if not num_turns:
        num_turns = 1 if rng.random() < 0.7 else rng.randint(2, 4)
    system = filler(rng, rng.randint(1, 3)) if rng.random() < 0.12 else ""
    return Conversation(system, tuple(_turns(rng, num_turns, held_out, chatter_share)))


def sample_long_conversation(
    rng: random.Random, num_tokens: int, *, held_out: bool = False
) -> Conversation:
    """A conversation whose prompt is about `num_tokens` long.

    Many turns, or a long text before the question.
    """
    kind = rng.random()
    last = sample_turn(rng, held_out=held_out, chatter_share=0.0 if held_out else 0.1)
    if kind < 0.5:
        return Conversation("", (*_turns_of_length(rng, int(num_tokens * _TURN_CHARACTERS)), last))
    text = _long_filler(rng, int(num_tokens * _FILLER_CHARACTERS))
    if kind < 0.75:
        return Conversation(text, (last,))
    return Conversation(
        "", (Turn(f"{text}\n\n{last.user}", last.thought, last.answer, last.problem),)
    )


def sample_dense_conversation(rng: random.Random, num_tokens: int) -> Conversation:
    """About `num_tokens` of turns with their thinking, for `pieces(keep_thinking=True)`."""
    turns: list[Turn] = []
    left = int(num_tokens * _DENSE_CHARACTERS)
    while left > 0:
        turns.append(sample_turn(rng, held_out=False, chatter_share=0.1))
        left -= len(turns[-1].user) + len(turns[-1].reply)
    return Conversation("", tuple(turns))


def evaluation_set(num_conversations: int, seed: int = 20) -> list[Conversation]:
    """Held-out arithmetic questions, worded and embedded as in training.

    The same list for the same arguments.
    """
    rng = random.Random(seed)
    return [
        sample_conversation(rng, held_out=True, chatter_share=0.0) for _ in range(num_conversations)
    ]


def chatter_set(num_conversations: int, seed: int = 21) -> list[Conversation]:
    """Prompts that are to be answered with what the model can do."""
    rng = random.Random(seed)
    return [
        sample_conversation(rng, held_out=True, chatter_share=1.0, num_turns=1)
        for _ in range(num_conversations)
    ]


def long_set(num_conversations: int, num_tokens: int, seed: int = 22) -> list[Conversation]:
    """Held-out questions at the end of about `num_tokens` of context."""
    rng = random.Random(seed)
    return [
        sample_long_conversation(rng, num_tokens, held_out=True) for _ in range(num_conversations)
    ]


def tokenizer_texts(num_conversations: int = 20_000, seed: int = 1) -> Iterator[str]:
    """Plain text (no control tokens) from which the tokenizer learns its merges."""
    rng = random.Random(seed)
    for _ in range(num_conversations):
        conversation = sample_conversation(rng, num_turns=1)
        yield f"{conversation.system}\n{conversation.turns[0].user}"
        yield conversation.turns[0].thought
        yield conversation.turns[0].answer


def _turns(
    rng: random.Random, num_turns: int, held_out: bool, chatter_share: float
) -> Iterator[Turn]:
    """Former turns are mixed, and from the side of training.

    Only the last is what the caller asked for.
    """
    for _ in range(num_turns - 1):
        yield sample_turn(rng, held_out=False, chatter_share=0.2)
    yield sample_turn(rng, held_out=held_out, chatter_share=chatter_share)


def _turns_of_length(rng: random.Random, num_characters: int) -> Iterator[Turn]:
    while num_characters > 0:
        turn = sample_turn(rng, held_out=False, chatter_share=0.2)
        num_characters -= len(turn.user) + len(turn.answer)
        yield turn


def _long_filler(rng: random.Random, num_characters: int) -> str:
    text = ""
    while len(text) < num_characters:
        text += filler(rng, 8) + rng.choice((" ", "\n", "\n\n"))
    return text.rstrip()
