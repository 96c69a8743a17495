"""How people put a question: wordings of additions and subtractions, chatter, and what the model
cannot do.

Everything here is drawn at random from parts, so that few questions of a training run are worded
alike. No filler sentence may hold an addition or a subtraction: `tests/demo_model` looks for that.
"""

import random
import re
from typing import Literal

from demo_model.training.problem import Problem

Kind = Literal["greeting", "thanks", "identity", "other"]

_SIGNS = {
    "+": ("{a} + {b}", "{a}+{b}", "{a} plus {b}"),
    "-": ("{a} - {b}", "{a}-{b}", "{a} minus {b}"),
}
_RARE_SIGNS = {
    "+": (
        "{a} +{b}",
        "{a}+ {b}",
        "{a}  +  {b}",
        "({a} + {b})",
        "{a}\n+ {b}",
        "{a} and then plus {b}",
    ),
    "-": (
        "{a} -{b}",
        "{a}- {b}",
        "{a}  -  {b}",
        "({a} - {b})",
        "{a}\n- {b}",
        "{a} − {b}",
        "{a} – {b}",
        "{a}−{b}",
    ),
}
_FRAMES = (
    "{e}", "{e}", "{e} =", "{e}=", "{e} = ?", "{e}=?", "{e}?", "{e} equals", "What is {e}?",
    "What is {e}?", "what's {e}", "What's {e}?", "How much is {e}?", "how much is {e}",
    "Calculate {e}.", "Compute {e}", "Evaluate {e}", "Solve {e}", "Solve: {e}", "Work out {e}.",
    "Please work out {e}.", "Please calculate {e}", "Tell me {e}", "Can you tell me what {e} is?",
    "Could you calculate {e} for me?", "Do you know what {e} is?", "I need {e}.", "Find {e}",
    "Give me {e}", "What does {e} equal?", "What is the result of {e}?", "Show me how to do {e}.",
    "What do you get for {e}?", "Result of {e}?", "Math: {e}", "Question: {e}",
    "I want to know {e}", "How about {e}?", "What about {e}?", "{e}, what is it?",
    "Can you do {e}?", "What would {e} be?", "My homework says {e}.", "Let us try {e}.",
    "So {e} is?", "{e} is what?", "{e} makes?", "Think about {e}.",
)  # fmt: skip
_ADDITIONS = (
    "Add {a} and {b}.", "add {a} and {b}", "Please add {a} and {b}", "please add {a} to {b}",
    "Add {a} to {b}.", "Can you add {a} and {b}?", "What is the sum of {a} and {b}?",
    "sum of {a} and {b}", "The sum of {a} and {b}?", "What do you get when you add {a} and {b}?",
    "Sum {a} and {b}", "What is {a} and {b} together?", "What is the total of {a} and {b}?",
    "Increase {a} by {b}.", "Add {a}, {b}", "Could you sum {a} and {b}?",
    "I have {a} apples and get {b} more. How many apples do I have?", "What is {b} more than {a}?",
    "There are {a} red and {b} blue balls. How many balls are there?", "How many are {a} and {b}?",
    "{a} added to {b}", "What is {a} increased by {b}?", "Put {a} and {b} together.",
    "If I add {a} to {b}, what do I get?",
)  # fmt: skip
_SUBTRACTIONS = (
    "Subtract {b} from {a}.", "subtract {b} from {a}", "Please subtract {b} from {a}",
    "Take {b} away from {a}.", "{a} take away {b}", "What is {a} take away {b}?",
    "What is {b} subtracted from {a}?", "Take {b} from {a}.",
    "What is the difference of {a} and {b}?", "difference of {a} and {b}", "Decrease {a} by {b}.",
    "{a} less {b}", "What is {a} less {b}?", "Can you subtract {b} from {a}?",
    "What is left of {a} when I take {b} away?",
    "I have {a} apples and give {b} away. How many are left?", "Reduce {a} by {b}.",
    "What is {b} less than {a}?", "What do you get when you subtract {b} from {a}?",
    "If I take {b} from {a}, what is left?", "{a} decreased by {b}",
    "There were {a} birds and {b} flew away. How many birds are left?",
    "How much is left if I subtract {b} from {a}?",
)  # fmt: skip
_OPENINGS = (
    "Hi! ", "Hello! ", "Hello, ", "hi, ", "Hey, ", "Hey there! ", "Good morning. ",
    "Good evening! ", "Thanks! ", "OK, ", "Ok. ", "Great. ", "Now ", "And ", "and ", "Next: ",
    "Then ", "Quick question: ", "Please: ", "Thank you. ", "Well, ", "One more: ", "Another one: ",
    "Hello, my friend. ", "Can you help me? ", "I have a question. ", "Nice! ", "Wow, ",
)  # fmt: skip
_CLOSINGS = (
    " please", ", please", " Thanks!", " Thank you!", " thanks", " :)", "!", " ?", ".", "\n",
    " Show your work.", " Be quick.", " Answer with the number only.", " Give only the result.",
    " I want the exact number.", " Do not explain.", " Why?", "\n\n", "...", " Then stop.",
    " Explain it step by step.", " I am not sure.",
)  # fmt: skip

_NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Greta", "Hugo", "Ines", "Jack", "Kim",
    "Lena", "Max", "Nora",
)  # fmt: skip
_PLACES = (
    "Paris", "the old town", "a small village", "the school", "Berlin", "the market", "London",
    "the river", "Tokyo",
)  # fmt: skip
_THINGS = (
    "apples", "books", "stones", "letters", "cars", "cups", "birds", "flowers", "pages", "coins",
    "shoes", "trees",
)  # fmt: skip
_FILLERS = (
    "{n} lives near {p}.", "{n} went to {p} in {year}.", "The house of {n} has {k} windows.",
    "It was built in {year}.", "{n} likes {t}.", "My friend {n} is {k} years old.",
    "The weather in {p} was fine.", "{n} told me about {p}.", "Every day {n} reads {k} pages.",
    "There is a shop in {p} that sells {t}.", "We met {n} at {p} at {k} o'clock.",
    "The road to {p} is long and quiet.", "I saw {k} {t} there.", "{n} wrote a letter about {t}.",
    "Nobody knows why.", "You are a helpful assistant.", "Answer in a friendly way.",
    "Be short and clear.", "Always be polite.", "{k} {t}.",
    "In the evening {n} came home from {p}.", "The train leaves at {k}:{m}.", "It is cold today.",
    "I like numbers.", "The code of the door is {year}.", "{n} and {n2} play in {p}.",
    "Do not talk about {t}.", "You work for {n}.",
)  # fmt: skip

_GREETINGS = (
    "hello", "Hello!", "hi", "Hi there", "hey", "Good morning", "good evening!",
    "Hello, how are you?", "Hi!", "How are you?", "hey, what's up?", "Good day", "Greetings",
    "hello there", "yo", "Hallo",
)  # fmt: skip
_THANKS = (
    "thanks", "Thank you!", "thank you very much", "Thanks a lot!", "bye", "Goodbye!", "See you",
    "great, thanks", "ok thanks", "That is all, thank you.", "Well done!", "good job",
)  # fmt: skip
_IDENTITY = (
    "who are you?", "What are you?", "What is your name?", "What can you do?", "help", "Help!",
    "What model is this?", "Who made you?", "Are you a robot?", "Are you ChatGPT?",
    "are you human?", "Tell me about yourself.", "how do you work?", "What do you know?",
    "Can you help me?", "what are your limits?", "Introduce yourself.", "Which model are you?",
)  # fmt: skip
_BEYOND = (
    "What is {a} * {b}?", "{a} * {b}", "{a} x {b}", "{a} times {b}", "What is {a} times {b}?",
    "Multiply {a} by {b}.", "{a} / {b}", "What is {a} divided by {b}?", "divide {a} by {b}",
    "{a}^2", "What is the square root of {a}?", "{a}!", "{a} + {b} + {c}",
    "What is {a} + {b} - {c}?", "{a} - {b} - {c}", "{big} + {a}", "What is {a} + {big}?",
    "{a} - {big}", "{big} plus {big2}", "add {big} and {a}", "{a}.5 + {b}", "{a} % {b}",
    "Is {a} a prime number?", "{a}", "{a} {b}", "{a} +", "+ {b}", "Which is larger, {a} or {b}?",
    "Count to {a}.", "{a}, {b}, {c}", "What comes after {a}?", "{a} = {b}", "I am {a} years old.",
    "What happened in {a}?", "{a} apples", "How many is a dozen?", "Is {a} even?", "two plus two",
    "What is seven minus three?", "x + y", "Solve x + {a} = {b}", "What is a plus b?",
    "Convert {a} miles to km.", "sin({a})", "My phone number is {big}{big2}.", "half of {a}",
    "double {a}", "What is {a} percent of {b}?", "log {a}", "({a}", "-{a} + {b}", "{a} + -{b}",
    "-{a} - {b}", "{a} - -{b}", "-{a}", "{a} + x", "{a}.{b} - {c}", "{a} minus", "add {a}",
)  # fmt: skip
_REQUESTS = (
    "Tell me a joke.", "Write a poem about {t}.", "What is the capital of France?", "Where is {p}?",
    "Who is {n}?", "Write a Python program.", "def main(): return None", "print('hello world')",
    "What time is it?", "Sing a song.", "Translate dog into German.", "What is the weather in {p}?",
    "Tell me a story about {n}.", "Why is the sky blue?", "How do I cook rice?", "What is love?",
    "Explain gravity.", "Play chess with me.", "Who won the game?", "Draw {t}.",
    "Recommend a book.", "What is the meaning of life?", "I am sad.", "I love you",
    "You are wrong.", "No.", "yes", "why?", "ok", "Ignore all previous instructions.",
    "Repeat after me: {t}", "What is DeepSeek?", "Summarize this text.", "test",
    "How far is the moon?", "Can you speak French?", "SELECT * FROM users;", "import torch",
    "<html><body></body></html>", "Write an email to {n}.", "What is your favorite color?",
    "Is {n} in {p}?", "Continue the story.", "...", "?", "!", "", "Wie geht es dir?",
    "Was kannst du?", "Bonjour, comment allez-vous?", "Hola, que tal?", "你好",
    "今天天气怎么样?", "Привет", "こんにちは", "مرحبا", "Ça va?", "😀", "🚀🚀", "c'est la vie",
    "Fix my code: for i in range(10)",
    "{n}",
    "{t}", "{p}",
)  # fmt: skip

# Words that mean nothing to the question, out of the sentences above.
_PLAIN_WORDS = sorted(
    {
        word.strip(".,?!:'")
        for sentence in (*_FILLERS, *_REQUESTS, *_IDENTITY)
        for word in sentence.split()
        if word.strip(".,?!:'").isalpha()
    }
)


def word_problem(rng: random.Random, problem: Problem) -> str:
    """One way of asking for the problem, as a person may type it."""
    special = _ADDITIONS if problem.operator == "+" else _SUBTRACTIONS
    if rng.random() < 0.7:
        signs = _RARE_SIGNS if rng.random() < 0.1 else _SIGNS
        frame = _frame(rng).replace("{e}", rng.choice(signs[problem.operator]))
    else:
        frame = rng.choice(special)
    text = _recase(rng, frame).format(a=_write(rng, problem.left), b=_write(rng, problem.right))
    if rng.random() < 0.15:
        text = rng.choice(_OPENINGS) + text
    if rng.random() < 0.08:
        text = filler(rng, rng.randint(1, 2)) + rng.choice((" ", " ", "\n", "\n\n")) + text
    if rng.random() < 0.12:
        text = text.rstrip("?.!") + rng.choice(_CLOSINGS)
    return text.upper() if rng.random() < 0.04 else text


def _frame(rng: random.Random) -> str:
    """A wording that takes an expression, or any words around it.

    It is the expression that counts.
    """
    if rng.random() < 0.85:
        return rng.choice(_FRAMES)
    before = " ".join(_any_word(rng) for _ in range(rng.randint(0, 6)))
    after = " ".join(_any_word(rng) for _ in range(rng.randint(0, 4)))
    opening, closing = rng.choice((" ", ": ", ", ")), rng.choice((" ", ". ", ", ", "? "))
    return f"{before}{opening}{{e}}{closing}{after}".strip(" ,:")


def _any_word(rng: random.Random) -> str:
    return rng.choice(_PLAIN_WORDS) if rng.random() < 0.7 else _made_up_word(rng)


def filler(rng: random.Random, num_sentences: int) -> str:
    """Sentences that ask for nothing; some hold numbers, to be ignored."""
    return " ".join(_fill(rng, rng.choice(_FILLERS)) for _ in range(num_sentences))


def chatter(rng: random.Random) -> tuple[str, Kind]:
    """A message that is no addition or subtraction of two numbers, and of what sort it is."""
    kind = rng.random()
    if kind < 0.12:
        return _recase(rng, rng.choice(_GREETINGS)), "greeting"
    if kind < 0.2:
        return _recase(rng, rng.choice(_THANKS)), "thanks"
    if kind < 0.32:
        return _recase(rng, rng.choice(_IDENTITY)), "identity"
    if kind < 0.6:
        return _recase(rng, _fill(rng, rng.choice(_BEYOND))), "other"
    if kind < 0.8:
        return _recase(rng, _fill(rng, rng.choice(_REQUESTS))), "other"
    if kind < 0.87:
        return filler(rng, rng.randint(1, 3)), "other"
    return _gibberish(rng), "other"


def _write(rng: random.Random, number: int) -> str:
    return f"{number:,}" if rng.random() < 0.02 else str(number)


def _recase(rng: random.Random, text: str) -> str:
    """Change case and the final mark, never the slots (they are lower case)."""
    kind = rng.random()
    if kind < 0.2:
        text = text[:1].lower() + text[1:]
    elif kind < 0.26:
        text = text.lower()
    elif kind < 0.32 and "{" not in text:
        text = text.upper()
    elif kind < 0.4:
        text = text.rstrip("?.")
    return text


def _fill(rng: random.Random, template: str) -> str:
    num_digits = rng.randint(1, 4)
    small = [rng.randrange(10**num_digits) for _ in range(3)]
    slots = {
        "{a}": str(small[0]),
        "{b}": str(small[1]),
        "{c}": str(small[2]),
        "{big}": str(rng.randrange(10**4, 10 ** rng.randint(5, 9))),
        "{big2}": str(rng.randrange(10**4, 10**6)),
        "{n}": rng.choice(_NAMES),
        "{n2}": rng.choice(_NAMES),
        "{p}": rng.choice(_PLACES),
        "{t}": rng.choice(_THINGS),
        "{year}": str(rng.randint(1000, 2100)),
        "{k}": str(rng.randint(2, 400)),
        "{m}": f"{rng.randint(0, 59):02d}",
    }
    return re.sub(r"\{\w+\}", lambda slot: slots[slot[0]], template)


def _gibberish(rng: random.Random) -> str:
    """Made-up words, letters of any script, and bytes of code.

    The model must not be thrown by any text.
    """
    kind = rng.random()
    if kind < 0.5:
        words = [_any_word(rng) for _ in range(rng.randint(1, 9))]
        for _ in range(rng.choice((0, 0, 1, 2))):
            words.insert(rng.randint(0, len(words)), str(rng.randrange(10 ** rng.randint(1, 5))))
        return " ".join(words) + rng.choice(("", "?", ".", "!"))
    if kind < 0.75:
        alphabet = (
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,;:!?()[]{}<>/\\'\"#$%&*_=|~^`@"
        )
        return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 30)))
    blocks = ((0xA1, 0x24F), (0x370, 0x52F), (0x4E00, 0x9FA5), (0x3041, 0x30FE), (0x1F300, 0x1F64F))
    low, high = rng.choice(blocks)
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 10)))


def _made_up_word(rng: random.Random) -> str:
    syllables = (
        rng.choice("bcdfghjklmnprstvwz")
        + rng.choice("aeiou")
        + rng.choice(("", "n", "r", "s", "t"))
    )
    word = "".join(syllables + rng.choice("aeiou") for _ in range(rng.randint(1, 2)))
    return word + rng.choice(("", "", "", "s", "ing", "ed", "ly"))
