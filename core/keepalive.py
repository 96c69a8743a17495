"""TCP connections on which a host that vanishes is noticed within 5 s, by unanswered probes or
unacknowledged data."""

import socket

_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),
)


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel look whether the other host is still there."""
    for level, option, value in _OPTIONS:
        connection.setsockopt(level, option, value)
