"""The socket that a gateway serves on."""

import socket

from core.address import parse_address


def listen_on(listen: str, *, shared: bool = False) -> socket.socket:
    """A bound socket; `shared` ones of this user may have the same address. Raises OSError that
    names the address."""
    host, port = parse_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {listen}: {error.strerror}") from error
    return listener
