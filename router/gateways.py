"""Gateways that have announced themselves lately."""

from collections import OrderedDict
from dataclasses import dataclass

from core.errors import InvalidRequest, Overloaded
from proto.router_pb2 import AnnounceRequest
from proto.worker_pb2 import ROLE_GATEWAY, ProcessIdentity
from router.identity_check import check_identity

EXPIRY_SECONDS = 5.0
MAX_GATEWAYS = 1024
MAX_CONFIG_CHARACTERS = 65536


@dataclass(slots=True, kw_only=True, eq=False)
class Gateway:
    """What a gateway last said; `wanted_log_level` is told to it until it obeys, "": nothing."""

    identity: ProcessIdentity
    announced_at: float
    config_json: str = ""
    log_level: str = ""
    version: str = ""
    wanted_log_level: str = ""


class GatewayTable:
    """Entries in the order of their last announcement; a restarted gateway replaces its
    earlier self of the same address and name. Processes of one gateway share an address."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], Gateway] = OrderedDict()

    def announce(self, request: AnnounceRequest, now: float) -> Gateway:
        """Raises InvalidRequest for what cannot be a gateway, Overloaded for too many."""
        identity = request.identity
        if identity.role != ROLE_GATEWAY or not identity.address or not identity.epoch:
            raise InvalidRequest(
                "an announcement needs the role gateway, an address and an epoch", param="identity"
            )
        check_identity(identity)
        if len(request.config_json) > MAX_CONFIG_CHARACTERS:
            raise InvalidRequest("these settings are too long", param="config_json")
        self._expire(now)
        key = (identity.address, identity.name)
        known = self._entries.get(key)
        if known is None and len(self._entries) >= MAX_GATEWAYS:
            raise Overloaded(f"{MAX_GATEWAYS} gateways are known already")
        if known is None or known.identity.epoch != identity.epoch:
            known = Gateway(identity=identity, announced_at=now)
        known.announced_at = now
        known.config_json = request.config_json
        known.log_level = request.log_level
        known.version = request.version
        if known.wanted_log_level == request.log_level:
            # Said once: another router may be told something else later.
            known.wanted_log_level = ""
        self._entries[key] = known
        self._entries.move_to_end(key)
        return known

    def alive(self, now: float) -> list[Gateway]:
        """Those heard of in the last EXPIRY_SECONDS, by address and name."""
        self._expire(now)
        return [self._entries[key] for key in sorted(self._entries)]

    def _expire(self, now: float) -> None:
        while self._entries:
            oldest = next(iter(self._entries.values()))
            if now - oldest.announced_at < EXPIRY_SECONDS:
                return
            self._entries.popitem(last=False)
