"""A channel whose calls carry the cluster's token, over connections that use its certificates."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from rpc.cluster_credentials import ClusterCredentials
from rpc.options import CHANNEL_OPTIONS


class ClusterChannel(grpc.aio.Channel):
    """As the library's, to `address`. A channel keeps the certificates that it was made with, so
    that new ones need a new channel: calls that are under way go on on the one before, which ends
    with the last of them."""

    def __init__(self, address: str, credentials: ClusterCredentials) -> None:
        self._address = address
        self._token = credentials.token
        self._tls = credentials.tls
        self._pems = None if self._tls is None else self._tls.current()
        self._connection = self._connect()

    def _connect(self) -> grpc.aio.Channel:
        if self._tls is None or self._pems is None:
            return grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", self._tls.name))
        return grpc.aio.secure_channel(self._address, self._pems.of_client(), options=options)

    def _current(self) -> grpc.aio.Channel:
        if self._tls is not None and self._pems is not (pems := self._tls.current()):
            self._pems = pems
            self._connection = self._connect()
        return self._connection

    def _method(self, kind: str, *form: object, **form_options: object) -> Callable[..., Any]:
        def call(
            *requests: object,
            metadata: tuple[tuple[str, str], ...] | None = None,
            **options: object,
        ) -> Any:  # noqa: ANN401 - a call of any kind
            method = getattr(self._current(), kind)(*form, **form_options)
            own = () if self._token is None else self._token.metadata()
            return method(*requests, metadata=(*(metadata or ()), *own), **options)

        return call

    def unary_unary(self, *form: Any, **options: Any) -> Any:  # noqa: ANN401 - as the library
        return self._method("unary_unary", *form, **options)

    def unary_stream(self, *form: Any, **options: Any) -> Any:  # noqa: ANN401 - as the library
        return self._method("unary_stream", *form, **options)

    def stream_unary(self, *form: Any, **options: Any) -> Any:  # noqa: ANN401 - as the library
        return self._method("stream_unary", *form, **options)

    def stream_stream(self, *form: Any, **options: Any) -> Any:  # noqa: ANN401 - as the library
        return self._method("stream_stream", *form, **options)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        await self._connection.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
