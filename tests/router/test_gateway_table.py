import pytest

from core.errors import InvalidRequest, Overloaded
from proto.worker_pb2 import ROLE_DECODE, ROLE_GATEWAY, ProcessIdentity
from router.gateways import EXPIRY_SECONDS, MAX_GATEWAYS, GatewayTable


def gateway(address: str, epoch: str = "e") -> ProcessIdentity:
    return ProcessIdentity(role=ROLE_GATEWAY, address=address, epoch=epoch)


def test_entries_live_five_seconds_past_their_last_announcement() -> None:
    table = GatewayTable()
    table.announce(gateway("a"), 0.0)
    table.announce(gateway("b"), 1.0)
    table.announce(gateway("a"), 4.0)
    assert [one.address for one in table.alive(5.9)] == ["a", "b"]
    assert [one.address for one in table.alive(1.0 + EXPIRY_SECONDS)] == ["a"]
    assert table.alive(4.0 + EXPIRY_SECONDS) == []


def test_a_restarted_gateway_replaces_itself() -> None:
    table = GatewayTable()
    table.announce(gateway("a", "old"), 0.0)
    table.announce(gateway("a", "new"), 1.0)
    assert [one.epoch for one in table.alive(2.0)] == ["new"]


@pytest.mark.parametrize(
    "identity",
    [
        ProcessIdentity(),
        ProcessIdentity(role=ROLE_DECODE, address="a", epoch="e"),
        gateway(""),
        gateway("a", ""),
    ],
)
def test_others_are_refused(identity: ProcessIdentity) -> None:
    with pytest.raises(InvalidRequest):
        GatewayTable().announce(identity, 0.0)


def test_the_table_is_bounded() -> None:
    table = GatewayTable()
    for number in range(MAX_GATEWAYS):
        table.announce(gateway(f"a{number}"), 0.0)
    with pytest.raises(Overloaded):
        table.announce(gateway("one more"), 1.0)
    table.announce(gateway("a7"), 1.0)
    table.announce(gateway("one more"), EXPIRY_SECONDS)
    assert [one.address for one in table.alive(EXPIRY_SECONDS)] == ["a7", "one more"]
