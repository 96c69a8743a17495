import pytest

from core.errors import InvalidRequest, Overloaded
from proto.router_pb2 import AnnounceRequest
from proto.worker_pb2 import ROLE_DECODE, ROLE_GATEWAY, ProcessIdentity
from router.gateways import EXPIRY_SECONDS, MAX_GATEWAYS, GatewayTable


def gateway(address: str, epoch: str = "e", name: str = "", **told: str) -> AnnounceRequest:
    identity = ProcessIdentity(role=ROLE_GATEWAY, address=address, epoch=epoch, name=name)
    return AnnounceRequest(identity=identity, **told)


def test_entries_live_five_seconds_past_their_last_announcement() -> None:
    table = GatewayTable()
    table.announce(gateway("a"), 0.0)
    table.announce(gateway("b"), 1.0)
    table.announce(gateway("a"), 4.0)
    assert [one.identity.address for one in table.alive(5.9)] == ["a", "b"]
    assert [one.identity.address for one in table.alive(1.0 + EXPIRY_SECONDS)] == ["a"]
    assert table.alive(4.0 + EXPIRY_SECONDS) == []


def test_a_restarted_gateway_replaces_itself() -> None:
    table = GatewayTable()
    table.announce(gateway("a", "old"), 0.0)
    table.announce(gateway("a", "new"), 1.0)
    assert [one.identity.epoch for one in table.alive(2.0)] == ["new"]


def test_processes_of_one_gateway_are_told_apart_by_name() -> None:
    table = GatewayTable()
    table.announce(gateway("a", "e0", "gateway-0"), 0.0)
    table.announce(gateway("a", "e1", "gateway-1"), 0.0)
    table.announce(gateway("a", "e2", "gateway-0"), 1.0)
    assert [one.identity.epoch for one in table.alive(2.0)] == ["e2", "e1"]


def test_a_wanted_log_level_is_told_until_it_is_in_force() -> None:
    table = GatewayTable()
    entry = table.announce(gateway("a", log_level="info"), 0.0)
    entry.wanted_log_level = "debug"
    assert table.announce(gateway("a", log_level="info"), 1.0).wanted_log_level == "debug"
    assert table.announce(gateway("a", log_level="debug"), 2.0).wanted_log_level == ""
    # What another router has told it since is not taken back.
    assert table.announce(gateway("a", log_level="error"), 3.0).wanted_log_level == ""
    entry.wanted_log_level = "debug"
    assert table.announce(gateway("a", "new", log_level="info"), 4.0).wanted_log_level == ""


@pytest.mark.parametrize(
    "request_",
    [
        AnnounceRequest(),
        AnnounceRequest(identity=ProcessIdentity(role=ROLE_DECODE, address="a", epoch="e")),
        gateway(""),
        gateway("a", ""),
        gateway("a", config_json="x" * 100_000),
    ],
)
def test_others_are_refused(request_: AnnounceRequest) -> None:
    with pytest.raises(InvalidRequest):
        GatewayTable().announce(request_, 0.0)


def test_the_table_is_bounded() -> None:
    table = GatewayTable()
    for number in range(MAX_GATEWAYS):
        table.announce(gateway(f"a{number}"), 0.0)
    with pytest.raises(Overloaded):
        table.announce(gateway("one more"), 1.0)
    table.announce(gateway("a7"), 1.0)
    table.announce(gateway("one more"), EXPIRY_SECONDS)
    assert [one.identity.address for one in table.alive(EXPIRY_SECONDS)] == ["a7", "one more"]


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("name", "g\x1b[2J"),
        ("name", "g\nrejected: decode-0"),
        ("name", "g" * 129),
        ("address", "a\r:1"),
        ("address", "a" * 301),
        ("epoch", "e\u202e"),
        ("version", "v\x00"),
    ],
)
def test_what_cannot_be_shown_is_no_gateway(field: str, text: str) -> None:
    table = GatewayTable()
    request = gateway("a:1")
    setattr(request.identity, field, text)
    with pytest.raises(InvalidRequest, match=field) as caught:
        table.announce(request, 0.0)
    assert caught.value.message.isprintable()
    assert table.alive(0.0) == []
