"""SIGTERM and SIGINT as an event to wait for."""

import asyncio
import signal


def stop_event(*, patient: bool = False) -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; call it inside the running loop.

    A second signal finds the default handlers again, so that an impatient operator wins; a
    container's first process, which the kernel spares, ignores it. So does one that is `patient`:
    its parent passes on what both may have got, from a terminal or a service manager, and takes
    it along when it ends at once.
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
