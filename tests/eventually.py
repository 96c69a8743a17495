"""Waiting for a condition, not for a time."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 20.0
POLL_SECONDS = 0.005


async def eventually(holds: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """What `holds` gives, or a coroutine of it, once that is true. TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while True:
            held = holds()
            if inspect.isawaitable(held):
                held = await held
            if held:
                return held
            await asyncio.sleep(POLL_SECONDS)
