"""Grammars compiled before anything is queued, in helper processes of this gateway.

A verdict that is known is told at once. What is new is parsed by a process that does nothing else,
so that nobody waits to hear of an error; then it is compiled and tried in its client's turn. What
took too long, or a process did not survive, is remembered only for a while: the machine may have
been busy.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from core.clock import Clock, SystemClock
from core.errors import InvalidRequest, Unavailable
from core.log import get_logger
from gateway.grammar.asked_process import AskedProcess, TooSlow
from gateway.grammar.fair_turns import FairTurns

log = get_logger("gateway.grammar_compiler")

COMPILE_SECONDS = 5.0
PARSE_SECONDS = 1.0
NUM_HELPERS = 2  # who is slow leaves one for the others
MAX_VERDICTS = 512
# Of grammars that are told: they are many times as large as what they are made of.
MAX_VERDICT_CHARACTERS = 32 * 2**20
FAILURE_SECONDS = 60.0
MAX_TEXT_BYTES = 256 * 2**10
PARSE_ONLY = "parse-only"


class GrammarCompiler:
    """Asks `gateway.grammar.grammar_process`. `close` ends its processes."""

    def __init__(
        self,
        folder: Path,
        eos_token_ids: tuple[int, ...],
        *,
        compile_seconds: float = COMPILE_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        arguments = [str(folder), *map(str, eos_token_ids)]
        self._helpers = [AskedProcess(arguments) for _ in range(NUM_HELPERS)]
        self._idle = list(self._helpers)  # the last one is taken
        self._parser = AskedProcess([PARSE_ONLY])
        self._clock = clock or SystemClock()
        self._turns = FairTurns(NUM_HELPERS, self._clock)
        self._parse_turns = FairTurns(1, self._clock)
        self._compile_seconds = compile_seconds
        self._tasks: dict[bytes, asyncio.Task[dict[str, Any]]] = {}
        self._verdicts: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    async def compile(self, request: Mapping[str, Any], *, param: str, client: str = "") -> str:
        """What workers are to be sent, as Lark.

        Raises InvalidRequest with the compiler's reason, RateLimited or Overloaded as
        `FairTurns.check`, and Unavailable when there is no compiler.
        """
        line = msgspec.json.encode(request)
        if len(line) > MAX_TEXT_BYTES:
            raise InvalidRequest(f"{param} is larger than {MAX_TEXT_BYTES} bytes", param=param)
        key = hashlib.sha256(line).digest()
        answer = self._verdicts.get(key)
        if answer is None:
            answer = await self._asked(key, line, client)
        else:
            self._verdicts.move_to_end(key)
        if "error" in answer:
            raise InvalidRequest(f"{param} does not compile: {answer['error']}", param=param)
        lark: str = answer["lark"]
        return lark

    async def warm(self) -> None:
        """Starts the first processes, so that no request has to wait for that."""
        try:
            async with self._helper("") as helper:
                await helper.start()
            async with self._parse_turns.of(""):
                await self._parser.start()
        except Unavailable:
            return  # logged; the next request tries again

    async def close(self) -> None:
        """Ends the processes and whatever waits for them."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for helper in (*self._helpers, self._parser):
            await helper.close()

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

    async def _asked(self, key: bytes, line: bytes, client: str) -> dict[str, Any]:
        task = self._tasks.get(key)  # who wants the same waits for the same answer
        if task is None:
            self._turns.check(client)
            task = asyncio.create_task(self._learn(key, line, client))
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key))
        # A client that leaves must not take the answer along: the next one would get it.
        return await asyncio.shield(task)

    async def _learn(self, key: bytes, line: bytes, client: str) -> dict[str, Any]:
        answer = await self._parse(line, client) or await self._compile(line, client)
        self._remember(key, answer)
        return answer

    async def _parse(self, line: bytes, client: str) -> dict[str, Any] | None:
        """What is wrong with it, if that can be seen at once."""
        async with self._parse_turns.of(client):
            try:
                answer = await self._parser.ask(line, PARSE_SECONDS)
            except TooSlow:
                return None
        return answer if "error" in answer else None

    async def _compile(self, line: bytes, client: str) -> dict[str, Any]:
        async with self._helper(client) as helper:
            began = self._clock.now()
            try:
                answer = await helper.ask(line, self._compile_seconds)
            except TooSlow as error:
                log.warning("grammar compiler ended", reason=str(error))
                answer = {"error": str(error), "ended": True}
            if "error" in answer:
                self._turns.blame(client, self._clock.now() - began)
            return answer

    @asynccontextmanager
    async def _helper(self, client: str) -> AsyncIterator[AskedProcess]:
        async with self._turns.of(client):
            helper = self._idle.pop()
            try:
                yield helper
            finally:
                self._idle.append(helper)


def _num_characters(answer: dict[str, Any]) -> int:
    return len(answer.get("lark", ""))
