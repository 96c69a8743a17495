"""A channel for tests that call processes of a cluster by themselves."""

from collections.abc import Callable
from typing import Any

import grpc

from ctl.base.cluster_access import find_token
from rpc.cluster_token import ClusterToken


class _Carrying(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg,misc]
    def __init__(self, router: str) -> None:
        self._router = router

    def _call(self, proceed: Callable[..., Any], details: Any, request: object) -> Any:
        file = find_token(self._router)
        metadata = () if file is None else ClusterToken(file).metadata()
        return proceed(details._replace(metadata=[*(details.metadata or ()), *metadata]), request)

    intercept_unary_unary = intercept_unary_stream = _call


def token_channel(address: str, router: str) -> grpc.Channel:
    """To a process of the `ctl up` whose router is at `router`, once that is there."""
    return grpc.intercept_channel(grpc.insecure_channel(address), _Carrying(router))
