"""Ports on the loopback interface.

Ports for workers are taken upwards from the gateway's, not by asking the kernel for any: those
are of the range that outgoing connections also take from, and one may be gone when a process
that died comes back to its old port.
"""

import socket
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"
# Where the proxies of `ctl up --proxies` listen, each at the port of its process. Linux alone has
# more than one address there.
PROXY_HOST = "127.0.0.2"
_LAST_PORT = 65535


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Nothing listens on the port. Connections left over from an earlier server do not count."""
    try:
        # With SO_REUSEADDR, which two sockets may be bound with as long as none of them listens.
        socket.create_server((host, port)).close()
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
