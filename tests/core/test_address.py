import pytest

from core.address import parse_address


@pytest.mark.parametrize("text", ["localhost:80", "127.0.0.1:0", "[::1]:65535", "a-b.c:1"])
def test_good_addresses_come_back(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "host", ":80", "host:", "host:x", "host:-1", "host:65536", "::1:80", "a b:1", "h:²"],
)
def test_bad_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="port"):
        parse_address(text)
