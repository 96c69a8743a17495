"""`host:port` texts, with IPv6 hosts in brackets."""

from ipaddress import ip_address
from typing import NamedTuple


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Splits `host:port`; port 0 means "any free one". Raises ValueError."""
    host, separator, port_text = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: write IPv6 addresses as [host]:port")
    if not separator or not host or any(letter.isspace() for letter in host):
        raise ValueError(f"{text!r} is not host:port")
    if not (port_text.isascii() and port_text.isdigit()) or int(port_text) > 65535:
        raise ValueError(f"{text!r}: the port must be a number from 0 to 65535")
    return Address(host, int(port_text))


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach what listens there, as far as the text tells."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
