"""The HTTP server of a metrics port: prometheus_client's application, for strangers too.

A request is as long as `MAX_HEAD_BYTES` and `REQUEST_SECONDS` at most, and so is the time that its
client takes to read the answer. Past `MAX_CONNECTIONS` the oldest one is cut: nobody keeps a
scraper out by holding connections.
"""

import io
import socket
import threading
import time
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

MAX_CONNECTIONS = 32
MAX_HEAD_BYTES = 16 * 2**10
REQUEST_SECONDS = 5.0
BACKLOG = 128


class ScrapeServer(ThreadingMixIn, WSGIServer):
    """Serves from a daemon thread until `shutdown`; each connection has a thread."""

    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError when the address is taken."""
        self._open: dict[socket.socket, None] = {}  # in the order they came
        self._lock = threading.Lock()
        self.address_family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        super().__init__((str(address[0]), port), _Handler)

    @classmethod
    def start(cls, host: str, port: int, registry: CollectorRegistry) -> Self:
        """Port 0: a free one."""
        server = cls(host, port)
        server.set_app(make_wsgi_app(registry))
        threading.Thread(target=server.serve_forever, daemon=True, name="metrics").start()
        return server

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - of typeshed
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # its client may have left
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - of typeshed
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - of typeshed
        """Clients that leave are nothing to tell of."""


class _Handler(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(io.BytesIO(_read_head(self.connection)))
        self.connection.settimeout(REQUEST_SECONDS)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 - its name there
        """Log nothing."""


def _read_head(connection: socket.socket) -> bytes:
    """What has come once the head is whole, too long, or too late."""
    until = time.monotonic() + REQUEST_SECONDS
    head = b""
    while b"\r\n\r\n" not in head and len(head) < MAX_HEAD_BYTES:
        connection.settimeout(max(0.001, until - time.monotonic()))
        try:
            data = connection.recv(4096)
        except TimeoutError:
            return b""
        if not data:
            break
        head += data
    return head
