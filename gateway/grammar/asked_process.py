"""A helper process that looks at grammars: `gateway.grammar.grammar_process`.

It is started by the first question, asked one at a time, and killed when it takes too long.
"""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Any

import msgspec

from core.errors import Unavailable
from core.log import get_logger

log = get_logger("gateway.asked_process")

START_SECONDS = 60.0
MAX_ANSWER_BYTES = 64 * 2**20


class TooSlow(Exception):  # noqa: N818 - no fault of the program
    """The process has not answered in time, or has not survived the question."""


class AskedProcess:
    """`close` ends the process."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.command = [sys.executable, "-m", "gateway.grammar.grammar_process", *arguments]
        self.process: Process | None = None

    async def ask(self, line: bytes, seconds: float) -> dict[str, Any]:
        """The answer to one line of JSON. Raises TooSlow, and Unavailable where the process does
        not start."""
        process = await self.start()
        assert process.stdin is not None
        try:
            process.stdin.write(line + b"\n")
            return await asyncio.wait_for(_read(process), seconds)
        except TimeoutError as error:
            await self.close()
            raise TooSlow(f"it takes more than {seconds:g} seconds") from error
        except (EOFError, ConnectionError) as error:
            await self.close()
            raise TooSlow("the compiler cannot cope with it") from error
        except BaseException:
            await self.close()
            raise

    async def start(self) -> Process:
        """Raises Unavailable."""
        if self.process is not None and self.process.returncode is None:
            return self.process
        await self.close()
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.command, stdin=PIPE, stdout=PIPE, stderr=None, limit=MAX_ANSWER_BYTES
            )
            await asyncio.wait_for(_read(self.process), START_SECONDS)
        except (OSError, EOFError) as failure:  # late, broken off, or no room for a process
            await self.close()
            log.error("the grammar compiler does not start", reason=repr(failure))
            raise Unavailable("structured output is not available") from failure
        except BaseException:
            await self.close()
            raise
        return self.process

    async def close(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


async def _read(process: Process) -> dict[str, Any]:
    """The next answer. Raises EOFError when the process has ended."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    answer: dict[str, Any] = msgspec.json.decode(line)
    return answer
