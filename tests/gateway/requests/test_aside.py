"""Large bodies do not hold the loop."""

import threading

import pytest

from gateway.requests.request_body import LARGE_BYTES, aside

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(("size", "is_aside"), [(LARGE_BYTES, False), (LARGE_BYTES + 1, True)])
async def test_what_is_large_is_done_in_a_thread(size: int, is_aside: bool) -> None:
    thread = await aside(size, threading.get_ident)
    assert (thread != threading.get_ident()) == is_aside


async def test_its_errors_are_the_callers() -> None:
    for size in (0, LARGE_BYTES + 1):
        with pytest.raises(ValueError, match="invalid literal"):
            await aside(size, int, "a")
