"""httptools' parser without the wish to change the protocol.

Some clients offer HTTP/2 with each request (`Upgrade: h2c`; Java's own, and curl with `--http2`),
which a server may ignore. The parser takes the body that follows for the other protocol.
"""

from typing import Protocol

import httptools


class Receiver(Protocol):
    """Gets the parser's callbacks, those for a head that is to be read again as well."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser:
    """Reads the head of a request that would change the protocol again, without that wish."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._parser = _make_parser(receiver)

    @property
    def skips(self) -> bool:
        """Whether the head that has just ended is to be read again. Tunnels (CONNECT) have no
        other form."""
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Raises what httptools' own raises."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self.skips:
                    raise
                (num_read,) = upgrade.args
                data = self._head() + data[num_read:]
                self._parser = _make_parser(self._receiver)

    def should_upgrade(self) -> bool:
        return False

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def _head(self) -> bytes:
        """As it came, but for the wish."""
        version = self.get_http_version().encode()
        lines = [self.get_method() + b" " + self._receiver.url + b" HTTP/" + version]
        for name, value in self._receiver.headers:
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"


def _make_parser(receiver: Receiver) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(receiver)
    # As uvicorn's own: what comes after the last request is ignored.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
