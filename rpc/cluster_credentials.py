"""What a process shows to others of its cluster, and asks of them: a token, certificates, or both.

cluster_credentials.use(settings)   # once, first in a process: its channels and servers obey
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc

from core.watched_files import WatchedFiles
from rpc.cluster_token import ClusterToken, TokenInterceptor


class ClusterAccess(Protocol):
    """Settings of a process, or options of a command."""

    @property
    def cluster_token_file(self) -> Path | None: ...
    @property
    def cluster_tls_cert(self) -> Path | None: ...
    @property
    def cluster_tls_key(self) -> Path | None: ...
    @property
    def cluster_tls_ca(self) -> Path | None: ...
    @property
    def cluster_tls_name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _Pems:
    """Contents of the three files."""

    cert: bytes
    key: bytes
    ca: bytes

    def of_client(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def of_server(self) -> Any:  # noqa: ANN401 - the stubs do not know its type
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)


class Tls:
    """Both sides show a certificate that `ca` has signed and that names `name`: who calls checks
    the name, as pods have no lasting addresses; who is called checks the signature.

    Raises ValueError for files that cannot be read or do not belong together. They are read again
    when they change: what connects from then on uses the new ones, what is connected stays.
    """

    def __init__(self, cert: Path, key: Path, ca: Path, name: str) -> None:
        self.name = name
        self._files = WatchedFiles(
            "certificate of the cluster", (cert, key, ca), partial(_read, cert, key, ca)
        )

    def current(self) -> _Pems:
        """The same object for as long as the files stay as they are."""
        return self._files.current()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Of clients a certificate is asked for."""
        first = self.current()
        made: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            first.of_server(), self._renewals(first), require_client_authentication=True
        )
        return made

    def _renewals(self, shown: _Pems) -> Callable[[], Any]:
        def look() -> Any:  # noqa: ANN401 - as `of_server`
            """At each handshake, in a thread of gRPC; None: what was shown last is still right."""
            nonlocal shown
            current = self.current()
            if current is shown:
                return None
            shown = current
            return current.of_server()

        return look


class ClusterCredentials:
    """Of both kinds those that there are; `takes_all`: calls without the token are let in."""

    def __init__(
        self, token: ClusterToken | None = None, tls: Tls | None = None, *, takes_all: bool = False
    ) -> None:
        self.token = token
        self.tls = tls
        self._takes_all = takes_all

    def interceptors(self) -> list[TokenInterceptor]:
        """Of a server, to be asked before all others."""
        return [] if self.token is None or self._takes_all else [TokenInterceptor(self.token)]

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """The port. Raises RuntimeError when it is taken."""
        if self.tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self.tls.server_credentials())


def load(access: ClusterAccess, *, takes_all: bool = False) -> ClusterCredentials:
    """Raises ValueError for files that make no sense."""
    file = access.cluster_token_file
    token = None if file is None else ClusterToken(file)
    cert, key, ca = access.cluster_tls_cert, access.cluster_tls_key, access.cluster_tls_ca
    if cert is None and key is None and ca is None:
        return ClusterCredentials(token, takes_all=takes_all)
    if cert is None or key is None or ca is None:
        raise ValueError(
            "--cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca belong together"
        )
    tls = Tls(cert, key, ca, access.cluster_tls_name)
    return ClusterCredentials(token, tls, takes_all=takes_all)


_used = ClusterCredentials()


def use(access: ClusterAccess) -> None:
    """From now on, for all channels and servers of this process. Raises as `load`."""
    global _used
    _used = load(access, takes_all=getattr(access, "insecure_cluster", False))


def used() -> ClusterCredentials:
    """Those of this process: none before `use`."""
    return _used


def _read(cert: Path, key: Path, ca: Path) -> _Pems:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The password: a key that needs one is refused instead of asking at the terminal.
        context.load_cert_chain(cert, key, password="")
        context.load_verify_locations(ca)
        return _Pems(cert.read_bytes(), key.read_bytes(), ca.read_bytes())
    except OSError as error:
        raise ValueError(f"certificate {cert}, key {key}, CA {ca}: {error}") from error
