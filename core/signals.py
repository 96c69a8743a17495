"""SIGTERM and SIGINT as an event to wait for."""

import asyncio
import signal


def stop_event(*, patient: bool = False) -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; call it inside the running loop.

    A second signal finds the default handlers again, so that an impatient operator wins; the
    kernel spares a container's first process. A `patient` process ignores it: its parent passes on
    what both may have got from a terminal, and takes it along when it ends at once.
    """
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def on_signal() -> None:
        event.set()
        if patient:
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return event
