"""What one stream over HTTP/2 needs of the protocol (RFC 9113, RFC 7541): frames, and headers to
write. Headers that come are read by the `hpack` library.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA = 0x0
HEADERS = 0x1
RST_STREAM = 0x3
SETTINGS = 0x4
PUSH_PROMISE = 0x5
PING = 0x6
GOAWAY = 0x7
WINDOW_UPDATE = 0x8
CONTINUATION = 0x9

ACK = 0x1
END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

SETTINGS_ENABLE_PUSH = 0x2
SETTINGS_INITIAL_WINDOW_SIZE = 0x4
SETTINGS_MAX_FRAME_SIZE = 0x5

# Until somebody says otherwise.
DEFAULT_WINDOW_BYTES = 65535
DEFAULT_FRAME_BYTES = 16384
MAX_WINDOW_BYTES = 2**31 - 1
MAX_FRAME_BYTES = 2**24 - 1

FRAME_HEAD_BYTES = 9
_HEAD = struct.Struct(">HBBBI")
_SETTING = struct.Struct(">HI")
_PRIORITY_BYTES = 5


class FrameError(Exception):
    """What the peer sent is no HTTP/2."""


class Frame(NamedTuple):
    """`stream` 0: of the whole connection."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frame_head(num_bytes: int, kind: int, flags: int, stream: int) -> bytes:
    """The nine bytes in front of a payload of `num_bytes`."""
    return _HEAD.pack(num_bytes >> 8, num_bytes & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return frame_head(len(payload), kind, flags, stream) + payload


def settings(values: Sequence[tuple[int, int]]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*one) for one in values))


def window_update(stream: int, num_bytes: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", num_bytes))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Raises FrameError."""
    if len(payload) % _SETTING.size:
        raise FrameError("settings of a wrong size")
    return list(_SETTING.iter_unpack(payload))


def read_number(payload: bytes) -> int:
    """The 31 bits that WINDOW_UPDATE, and GOAWAY before its reason, hold. Raises FrameError."""
    if len(payload) < 4:
        raise FrameError("a frame that is too short")
    return int.from_bytes(payload[:4], "big") & MAX_WINDOW_BYTES


def without_padding(one: Frame) -> bytes:
    """The payload of DATA or HEADERS. Raises FrameError."""
    payload, num_padding = one.payload, 0
    if one.flags & PADDED:
        if not payload:
            raise FrameError("padding without a length")
        num_padding, payload = payload[0], payload[1:]
    if one.kind == HEADERS and one.flags & HAS_PRIORITY:
        payload = payload[_PRIORITY_BYTES:]
    if num_padding > len(payload):
        raise FrameError("more padding than payload")
    return payload[: len(payload) - num_padding]


def header_block(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Headers as they are: never indexed, so that nothing has to be remembered."""
    return b"".join(
        b"\0" + _length(len(name)) + name + _length(len(value)) + value for name, value in headers
    )


def _length(number: int) -> bytes:
    """An integer with a prefix of seven bits."""
    if number < 127:
        return bytes((number,))
    encoded, number = [127], number - 127
    while number >= 128:
        encoded.append(number % 128 + 128)
        number //= 128
    return bytes((*encoded, number))


class FrameReader:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole by now. Raises FrameError for one larger than we allow."""
        if self._rest:
            data = self._rest + data
        position = 0
        while len(data) - position >= FRAME_HEAD_BYTES:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, position)
            num_bytes = high << 8 | low
            if num_bytes > DEFAULT_FRAME_BYTES:
                raise FrameError(f"a frame of {num_bytes} bytes")
            begin = position + FRAME_HEAD_BYTES
            if len(data) < begin + num_bytes:
                break
            position = begin + num_bytes
            yield Frame(kind, flags, stream & MAX_WINDOW_BYTES, data[begin:position])
        self._rest = data[position:]
