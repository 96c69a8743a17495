"""Answers `ctl plan`: questions as JSON on stdin, plans as JSON on stdout.

Flags and models that a worker would refuse end it with status 2 and a line for each on stderr, as
they would end the worker.
"""

import sys

import msgspec

from core.group_plan import GroupQuestion
from engine.planning.answer import answer


def main() -> None:
    questions = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[GroupQuestion, ...])
    try:
        answers = [answer(question) for question in questions]
    except ValueError as error:
        sys.exit(_refused(error))
    sys.stdout.buffer.write(msgspec.json.encode(answers))


def _refused(error: ValueError) -> int:
    sys.stderr.write(f"error: {error}\n")
    return 2


if __name__ == "__main__":
    main()
