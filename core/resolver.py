"""Looking names up without the event loop ever waiting for a resolver that hangs."""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future

from core.address import Address, parse_address

# Answers that say "no such host", not "ask again later".
_NO_SUCH_HOST = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}

Lookup = Callable[[str, int], list[str]]


def is_literal(address: str) -> bool:
    """Whether the host of `host:port` is an IP address, so that there is nothing to look up."""
    try:
        ipaddress.ip_address(parse_address(address).host)
    except ValueError:
        return False
    return True


def system_lookup(host: str, port: int) -> list[str]:
    """All `ip:port` of a name, sorted; [] when no such name exists. Blocks.
    Of a host with addresses of both families only IPv4 ones, so that it is met once. OSError when
    the resolver could not tell."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_SUCH_HOST:
            return []
        raise
    by_family: dict[int, set[str]] = {}
    for family, _kind, _protocol, _name, where in found:
        by_family.setdefault(family, set()).add(str(Address(str(where[0]), port)))
    return sorted(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or ())


async def resolve(
    address: str, *, timeout_seconds: float, lookup: Lookup = system_lookup
) -> list[str]:
    """All `ip:port` of `host:port`, sorted; [] when there are none.
    OSError when the resolver could not tell, or not within `timeout_seconds`."""
    host, port = parse_address(address)
    found: Future[list[str]] = Future()
    found.set_running_or_notify_cancel()  # whoever stops waiting does not cancel it

    def work() -> None:
        try:
            found.set_result(lookup(host, port))
        except OSError as error:
            found.set_exception(error)
        except UnicodeError as error:  # a name that cannot be one
            found.set_exception(OSError(str(error)))

    # A thread of its own: a pool's threads are waited for when the loop ends, for as long as the
    # resolver likes.
    threading.Thread(target=work, name=f"resolve {host}", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_seconds):
            return await asyncio.wrap_future(found)
    except TimeoutError:
        raise OSError(f"no answer for {host!r} within {timeout_seconds:g} s") from None
