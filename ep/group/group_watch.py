"""Ends this process when a peer that others wait for is lost, wherever this rank is.

A rank that starts may load for many minutes, or wait for one that does, and not look at the peer
that died meanwhile. Kernels that exchange rows by themselves have no time limit: when a peer dies
in the middle of one, it spins, and the host waits for it where it notices nothing. A thread looks
at the connections of the group instead, and at how long the current step takes. It never reads
from them.
"""

import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from core.log import get_logger

log = get_logger("ep.group_watch")

# For the thread that uses the group to notice it by itself, and to say more about it.
GRACE_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
EXIT_CODE = 70


class GroupWatch:
    def __init__(
        self,
        peers: Sequence[socket.socket],
        *,
        grace_seconds: float = GRACE_SECONDS,
        end: Callable[[str], None] | None = None,
    ) -> None:
        """Begins to watch; steps may take any time. `end` (default: the process ends) is called
        with the reason, from the watching thread, once."""
        self._step_seconds = math.inf
        self._grace_seconds = grace_seconds
        self._end = end or _end_process
        self._poller = select.poll()
        for connection in peers:
            self._poller.register(connection.fileno(), select.POLLRDHUP)
        self._stop_reading, self._stop_writing = os.pipe()
        self._poller.register(self._stop_reading, select.POLLIN)
        self._began: float | None = None  # the step; None: there is none
        self._thread = threading.Thread(target=self._look, name="group-watch", daemon=True)
        self._thread.start()

    def limit_steps(self, seconds: float) -> None:
        """What a step may take from now on, beside the grace."""
        self.beat()
        self._step_seconds = seconds

    def beat(self) -> None:
        """A step begins, and the one before has ended."""
        self._began = time.monotonic()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """There is no step for as long as this lasts."""
        self._began = None
        try:
            yield
        finally:
            self.beat()

    def close(self) -> None:
        """Before the connections are closed."""
        os.close(self._stop_writing)
        self._thread.join()
        os.close(self._stop_reading)

    def _look(self) -> None:
        while True:
            ready = dict(self._poller.poll(_LOOK_SECONDS * 1000))
            if self._stop_reading in ready:
                return
            if any(event & _GONE for event in ready.values()):
                if self._stopped_within(self._grace_seconds):
                    return
                self._end("a rank of the group is lost, and the device may wait for it for ever")
                return
            began = self._began
            most = self._step_seconds + self._grace_seconds
            if began is not None and time.monotonic() - began > most:
                self._end(f"a step of the group takes more than {most:g} s")
                return

    def _stopped_within(self, seconds: float) -> bool:
        stop = select.poll()
        stop.register(self._stop_reading, select.POLLIN)
        return bool(stop.poll(seconds * 1000))


def _end_process(reason: str) -> None:
    log.error("this rank ends", reason=reason)
    os._exit(EXIT_CODE)
