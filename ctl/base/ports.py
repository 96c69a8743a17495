"""Ports on the loopback interface.

Ports for workers are taken upwards from the gateway's, not by asking the kernel for any: those
are of the range that outgoing connections also take from, and one may be gone when a process
that died comes back to its old port.
"""

import socket
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"
_LAST_PORT = 65535


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Nothing listens on the port. Connections left over from an earlier server do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # Two sockets may be bound with SO_REUSEADDR as long as none of them listens.
            probe.listen(1)
        except OSError:
            return False
        return True


def free_ports(first: int) -> Iterator[int]:
    """Free ports from `first` upwards, each once.

    Raises ValueError when there are no more.
    """
    for port in range(first, _LAST_PORT + 1):
        if is_free(port):
            yield port
    raise ValueError(f"no free port from {first} upwards")
