"""Gateways that have announced themselves lately."""

from collections import OrderedDict

from core.errors import InvalidRequest, Overloaded
from proto.worker_pb2 import ROLE_GATEWAY, ProcessIdentity

EXPIRY_SECONDS = 5.0
MAX_GATEWAYS = 1024


class GatewayTable:
    """Entries in the order of their last announcement; a restarted gateway replaces its
    earlier self at the same address."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, tuple[float, ProcessIdentity]] = OrderedDict()

    def announce(self, identity: ProcessIdentity, now: float) -> None:
        """Raises InvalidRequest for what cannot be a gateway, Overloaded for too many."""
        if identity.role != ROLE_GATEWAY or not identity.address or not identity.epoch:
            raise InvalidRequest(
                "an announcement needs the role gateway, an address and an epoch", param="identity"
            )
        self._expire(now)
        if identity.address not in self._entries and len(self._entries) >= MAX_GATEWAYS:
            raise Overloaded(f"{MAX_GATEWAYS} gateways are known already")
        self._entries[identity.address] = (now, identity)
        self._entries.move_to_end(identity.address)

    def alive(self, now: float) -> list[ProcessIdentity]:
        """Those heard of in the last EXPIRY_SECONDS, by address."""
        self._expire(now)
        identities = [identity for _at, identity in self._entries.values()]
        return sorted(identities, key=lambda identity: identity.address)

    def _expire(self, now: float) -> None:
        while self._entries:
            announced_at, _identity = next(iter(self._entries.values()))
            if now - announced_at < EXPIRY_SECONDS:
                return
            self._entries.popitem(last=False)
