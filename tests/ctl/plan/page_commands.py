"""Commands of our pages that start workers on GPUs, and the GPUs that they are meant for."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = REPOSITORY / "deploy" / "helm" / "examples"
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CARD = re.compile(r"(?:(\d+|two|four|eight) (?:x )?)?(H100 NVL|H100|H200|H800|H20)\b")
_NUMBERS = {"two": 2, "four": 4, "eight": 8}
# What a shell would put in: any address does.
_SHELL = re.compile(r"\$\(.*?\)|\$\{?\w+\}?")


@dataclass(frozen=True)
class Card:
    """As `ctl plan --gpu` has it; `count` of a machine, where it is said."""

    name: str
    count: int


@dataclass(frozen=True)
class Command:
    """`program` is up, plan, prefill or decode. `card` is named in its block, or before it. Of one
    that `is_shown` the page has the output."""

    page: Path
    program: str
    arguments: tuple[str, ...]
    card: Card | None
    is_shown: bool = False

    def __str__(self) -> str:
        page = self.page.relative_to(REPOSITORY)
        return f"{page}: {self.program} {shlex.join(self.arguments)}"


def pages() -> list[Path]:
    roots = (REPOSITORY, REPOSITORY / "docs")
    return [
        *(page for root in roots for page in sorted(root.glob("*.md"))),
        *sorted((REPOSITORY / "deploy").rglob("*.md")),
    ]


def commands(page: Path, text: str) -> Iterator[Command]:
    """Of all blocks: `ctl plan`, and what starts workers on GPUs."""
    for block in _BLOCK.finditer(text):
        card = card_in(block[1]) or card_in(text[: block.start()], last=True)
        for line in block[1].replace("\\\n", " ").splitlines():
            own = card_in(line) or card
            for program, arguments in _programs(line):
                told = " ".join(arguments).replace("=", " ")
                if program == "plan" or "--device cuda" in told:
                    yield Command(page, program, tuple(arguments), own, line.startswith("$ "))


def card_in(text: str, *, last: bool = False) -> Card | None:
    found = list(_CARD.finditer(text))
    if not found:
        return None
    number, name = found[-1 if last else 0].groups()
    count = _NUMBERS.get(number or "", 0) or int(number or 0)
    return Card(name.lower().replace(" ", "-"), count)


def _programs(line: str) -> Iterator[tuple[str, Sequence[str]]]:
    """(program, its arguments) of a line of a shell."""
    if not re.search(r"ctl |_worker|epserve|UP_ARGS", line):
        return
    words = shlex.split(_SHELL.sub("10.0.0.1", line), comments=True)
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        rest = words[index + 1 :]
        if before.endswith("ctl") and word in ("up", "plan"):
            yield word, rest
        elif word.startswith("UP_ARGS="):
            yield "up", shlex.split(word.partition("=")[2])
        elif before == "-m" and word in ("prefill_worker", "decode_worker"):
            yield word.removesuffix("_worker"), rest
        elif "epserve" in before and word in ("prefill", "decode"):
            yield word, rest
