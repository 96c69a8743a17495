"""Grammars compiled before anything is queued, in a helper process of this gateway.

The process is started by `warm` or by the first request that needs it, asked one grammar at a
time, and killed when one takes too long. Verdicts are remembered; of a
grammar that the process did not survive only for a while: the machine may have been busy.
"""

import asyncio
import hashlib
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from core.errors import InvalidRequest, Overloaded, Unavailable
from core.log import get_logger

log = get_logger("gateway.grammar_compiler")

COMPILE_SECONDS = 5.0
START_SECONDS = 60.0
MAX_WAITING = 64
MAX_VERDICTS = 512
# Of grammars that are told: they are many times as large as what they are made of.
MAX_VERDICT_CHARACTERS = 32 * 2**20
FAILURE_SECONDS = 60.0
MAX_TEXT_BYTES = 256 * 2**10
MAX_ANSWER_BYTES = 64 * 2**20


class GrammarCompiler:
    """Asks `gateway.grammar.grammar_process`. `close` ends the process."""

    def __init__(
        self,
        folder: Path,
        eos_token_ids: tuple[int, ...],
        *,
        compile_seconds: float = COMPILE_SECONDS,
    ) -> None:
        self._command = [sys.executable, "-m", "gateway.grammar.grammar_process", str(folder)]
        self._command += [str(token_id) for token_id in eos_token_ids]
        self._compile_seconds = compile_seconds
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._tasks: dict[bytes, asyncio.Task[dict[str, Any]]] = {}
        self._verdicts: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    async def compile(self, request: Mapping[str, Any], *, param: str) -> str:
        """What workers are to be sent, as EBNF; "" where the text of `request` itself will do.

        Raises InvalidRequest with the compiler's reason, Overloaded when too many wait, and
        Unavailable when there is no compiler.
        """
        line = msgspec.json.encode(request)
        if len(line) > MAX_TEXT_BYTES:
            raise InvalidRequest(f"{param} is larger than {MAX_TEXT_BYTES} bytes", param=param)
        key = hashlib.sha256(line).digest()
        answer = self._verdicts.get(key)
        if answer is None:
            answer = await self._asked(key, line)
        else:
            self._verdicts.move_to_end(key)
        if "error" in answer:
            raise InvalidRequest(f"{param} does not compile: {answer['error']}", param=param)
        ebnf: str = answer["ebnf"]
        return ebnf

    async def warm(self) -> None:
        """Starts the process, so that no request has to wait for that."""
        async with self._lock:
            try:
                await self._running()
            except Unavailable:
                return  # logged; the next request tries again
            except BaseException:
                await self._end_process()
                raise

    async def close(self) -> None:
        """Ends the process and whatever waits for it."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end_process()

    def _remember(self, key: bytes, answer: dict[str, Any]) -> None:
        """In the place of the least recently used ones."""
        self._verdicts[key] = answer
        if "ended" in answer:
            loop = asyncio.get_running_loop()
            loop.call_later(FAILURE_SECONDS, self._verdicts.pop, key, None)
        num_characters = sum(map(_num_characters, self._verdicts.values()))
        while len(self._verdicts) > MAX_VERDICTS or num_characters > MAX_VERDICT_CHARACTERS:
            _, answer = self._verdicts.popitem(last=False)
            num_characters -= _num_characters(answer)

    async def _asked(self, key: bytes, line: bytes) -> dict[str, Any]:
        task = self._tasks.get(key)  # who wants the same waits for the same answer
        if task is None:
            if len(self._tasks) >= MAX_WAITING:
                raise Overloaded("too many grammars wait to be compiled")
            task = asyncio.create_task(self._learn(key, line))
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key))
        # A client that leaves must not take the answer along: the next one would get it.
        return await asyncio.shield(task)

    async def _learn(self, key: bytes, line: bytes) -> dict[str, Any]:
        answer = await self._ask(line)
        self._remember(key, answer)
        return answer

    async def _ask(self, line: bytes) -> dict[str, Any]:
        async with self._lock:
            process = await self._running()
            assert process.stdin is not None
            process.stdin.write(line + b"\n")
            try:
                return await asyncio.wait_for(_read(process), self._compile_seconds)
            except TimeoutError:
                error = f"it takes more than {self._compile_seconds:g} seconds"
            except (EOFError, ConnectionError):
                error = "the compiler cannot cope with it"
            except BaseException:
                await self._end_process()
                raise
            log.warning("grammar compiler ended", reason=error)
            await self._end_process()
            return {"error": error, "ended": True}

    async def _running(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._end_process()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=None, limit=MAX_ANSWER_BYTES
            )
            await asyncio.wait_for(_read(self._process), START_SECONDS)
        except (OSError, EOFError) as failure:  # late, broken off, or no room for a process
            await self._end_process()
            log.error("the grammar compiler does not start", reason=repr(failure))
            raise Unavailable("structured output is not available") from failure
        return self._process

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


def _num_characters(answer: dict[str, Any]) -> int:
    return len(answer.get("ebnf", ""))


async def _read(process: Process) -> dict[str, Any]:
    """The next answer. Raises EOFError when the process has ended."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    answer: dict[str, Any] = msgspec.json.decode(line)
    return answer
