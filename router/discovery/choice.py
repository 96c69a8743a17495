"""The discovery that the settings ask for."""

import importlib
from collections.abc import Callable, Iterable, Mapping

from proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL, Role
from router.discovery.dns import DnsDiscovery
from router.discovery.members import Discovery, DiscoveryError, Member, Report
from router.settings import RouterSettings


class StaticDiscovery:
    """Workers from the command line: always the same."""

    def __init__(self, addresses: Mapping[Role.ValueType, Iterable[str]]) -> None:
        self._members = [
            Member(id=address, address=address, role=role)
            for role, listed in addresses.items()
            for address in dict.fromkeys(listed)
        ]

    async def follow(self, report: Report) -> None:
        report("static", self._members)


def make_discovery(settings: RouterSettings, on_failure: Callable[[], None]) -> Discovery:
    """`on_failure` is called for each failed attempt to learn something. Raises
    DiscoveryError when there is no way to."""
    if settings.discovery == "static":
        return StaticDiscovery({ROLE_PREFILL: settings.prefill, ROLE_DECODE: settings.decode})
    if settings.discovery == "dns":
        roles = ((ROLE_PREFILL, settings.prefill_dns), (ROLE_DECODE, settings.decode_dns))
        return DnsDiscovery(
            {name: role for role, names in roles for name in names},
            interval_seconds=settings.dns_interval_seconds,
            on_failure=on_failure,
        )
    try:
        # Half a second, and a package that only this needs.
        module = importlib.import_module("router.discovery.kubernetes")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "kubernetes":
            raise
        raise DiscoveryError(
            "--discovery kubernetes needs the package kubernetes: pip install 'epserve[kubernetes]'"
        ) from error
    discovery: Discovery = module.KubernetesDiscovery(
        {ROLE_PREFILL: settings.prefill_selector, ROLE_DECODE: settings.decode_selector},
        server=settings.kubernetes_api,
        namespace=settings.kubernetes_namespace,
        worker_port=settings.worker_port,
        reconcile_seconds=settings.kubernetes_reconcile_seconds,
        on_failure=on_failure,
    )
    return discovery
