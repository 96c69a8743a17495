"""Requests that come together begin in turns."""

import asyncio

from gateway.http.start_pacer import TURNS_BETWEEN, StartPacer


class Loop:
    """Counts the turns of the running loop, and tells in which of them somebody began."""

    def __init__(self) -> None:
        self.turns = StartPacer()
        self.began: list[tuple[str, int]] = []
        self.num_turns = 0

    async def begin(self, name: str) -> None:
        await self.turns.wait()
        self.began.append((name, self.num_turns))

    async def run(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.num_turns += 1
            await asyncio.sleep(0)


async def test_who_comes_alone_does_not_wait() -> None:
    loop = Loop()
    for name in "abc":
        await loop.begin(name)
        await loop.run(2)
    assert loop.began == [("a", 0), ("b", 2), ("c", 4)]


async def test_who_comes_together_begins_in_order_with_turns_between() -> None:
    loop = Loop()
    tasks = [asyncio.create_task(loop.begin(name)) for name in "abcd"]
    await loop.run(5 * TURNS_BETWEEN)
    await asyncio.gather(*tasks)
    assert [name for name, _ in loop.began] == [*"abcd"]
    times = [at for _, at in loop.began]
    assert all(later - at >= TURNS_BETWEEN for at, later in zip(times, times[1:], strict=False))
    await loop.begin("e")  # it is nobody's turn by now
    assert loop.began[-1] == ("e", loop.num_turns)


async def test_who_has_left_is_passed_over() -> None:
    loop = Loop()
    tasks = [asyncio.create_task(loop.begin(name)) for name in "abcd"]
    await loop.run(1)
    tasks[1].cancel()
    tasks[3].cancel()
    await loop.run(3 * TURNS_BETWEEN)
    assert [name for name, _ in loop.began] == ["a", "c"]
    await loop.begin("e")
    assert loop.began[-1] == ("e", loop.num_turns)
