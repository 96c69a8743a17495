"""Answers `ctl plan`: questions as JSON on stdin, plans as JSON on stdout.

Flags that a worker would refuse end it with status 2 and a line for each on stderr, as they would
end the worker.
"""

import sys

import msgspec

from core.group_plan import GroupQuestion
from engine.planning.answer import answer


def main() -> None:
    questions = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[GroupQuestion, ...])
    sys.stdout.buffer.write(msgspec.json.encode([answer(question) for question in questions]))


if __name__ == "__main__":
    main()
