"""HTTP/2 of a client with one stream: the `h2` library's, but for plain data frames.

Those are nearly all frames there are, and what the library does for each costs as much as all that
a message needs otherwise. They are read and written here, as RFC 9113 (4.1, 6.1) has them:

    bytes   3        1      1       4        length
    what    length   kind   flags   stream   data

A data frame with padding, or one that ends the stream, is the library's like all other kinds. It
counts what it sees against the peer's windows; what it does not see is counted by `on_read`.
"""

import struct

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, Event
from h2.exceptions import FrameTooLargeError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import Frame, GoAwayFrame, WindowUpdateFrame

STREAM = 1
_FIRST_WINDOW_BYTES = 65535
_HEAD = struct.Struct(">IBI")  # length and kind, flags, stream
_KIND_BITS = 8
_DATA = 0


class Http2Connection(H2Connection):
    """Reads and writes bytes; whoever has it moves them."""

    def __init__(self, window_bytes: int) -> None:
        """The peer may send so many bytes before it is told that they were read."""
        # Our own headers are right; those of the peer are checked.
        config = H2Configuration(
            header_encoding="utf-8",
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        super().__init__(config)
        self.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: window_bytes,
            },
        )
        self._window_bytes = window_bytes
        self._num_read = 0
        self._rest = b""

    def open(self, headers: list[tuple[str, str]]) -> None:
        """Greets the peer, and begins the stream."""
        self.initiate_connection()
        self.increment_flow_control_window(self._window_bytes - _FIRST_WINDOW_BYTES)
        self.send_headers(STREAM, headers)

    @property
    def room(self) -> int:
        """Bytes that the next data frame may have."""
        return min(self.local_flow_control_window(STREAM), self.max_outbound_frame_size)

    def data_frame(self, content: bytes) -> bytes:
        """For the peer; at most `room` bytes of content."""
        self.outbound_flow_control_window -= len(content)
        self.streams[STREAM].outbound_flow_control_window -= len(content)
        return _HEAD.pack(len(content) << _KIND_BITS | _DATA, 0, STREAM) + content

    def receive(self, content: bytes) -> list[bytes | Event]:
        """Data and events that all of the frames which are whole by now come to, in order.

        Raises ProtocolError for what is none of HTTP/2.
        """
        if self._rest:
            content = self._rest + content
        received: list[bytes | Event] = []
        position = 0
        while len(content) - position >= _HEAD.size:
            length_and_kind, flags, stream = _HEAD.unpack_from(content, position)
            length = length_and_kind >> _KIND_BITS
            if length > self.max_inbound_frame_size:
                raise FrameTooLargeError(f"a frame of {length} bytes")
            begin = position + _HEAD.size
            end = begin + length
            if len(content) < end:
                break
            if stream == STREAM and not flags and length_and_kind & 0xFF == _DATA:
                received.append(content[begin:end])
            else:
                received += self.receive_data(content[position:end])
            position = end
        self._rest = content[position:]
        return received

    def on_read(self, num_bytes: int) -> None:
        """Of data that `receive` returned; the peer is told now and then."""
        self._num_read += num_bytes
        # The library tells of what it has seen by halves of a window: were this half of one, too,
        # both together could keep from the peer all that it may send.
        if self._num_read <= self._window_bytes // 4:
            return
        updates: list[Frame] = []
        for stream in (0, STREAM):
            update = WindowUpdateFrame(stream)
            update.window_increment = self._num_read
            updates.append(update)
        self._num_read = 0
        self._prepare_for_sending(updates)

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        # The library takes nothing more after one, but a gRPC server that drains says so first
        # and then lets the streams that it has go on.
        gone = ConnectionTerminated()
        gone.last_stream_id = frame.last_stream_id
        return [], [gone]
