"""Ports for servers that are told where to listen.

Not asked of the kernel: those for port 0 are of the range that outgoing connections and other
servers take from, and one that was free may be gone when the server that it is meant for, or its
successor, gets there.
"""

import itertools
import os

from ctl.base.ports import is_free

FIRST_PORT = 10_000
ROOM = 40  # `ctl up` takes the ports of workers upwards from the gateway's
NUM_PLACES = 300

# Processes that test side by side begin in different places.
_turns = itertools.count(os.getpid() * 61)


def free_port(number: int = 1) -> int:
    """The first of `number` consecutive free ports on the loopback interface; each time another."""
    for turn in itertools.islice(_turns, NUM_PLACES):
        first = FIRST_PORT + turn % NUM_PLACES * ROOM
        if all(is_free(first + offset) for offset in range(number)):
            return first
    raise OSError(f"no {number} consecutive free ports from {FIRST_PORT} upwards")
