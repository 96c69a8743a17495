"""What prefill tells decode with each transfer: which pages of which attempt have landed.

A transfer may serve several attempts and layers; its message is a list of notices. Decode
counts layer-pages: an attempt's KV is complete when its notices add up to num_layers times
the pages of its sink. No page of a layer is ever announced twice for one attempt.
"""

from collections.abc import Sequence

import msgspec


class KvNotice(msgspec.Struct, frozen=True, array_like=True):
    """Pages `first_page` .. `first_page + num_pages` of the attempt's sink, counted in token
    order (not page ids), in layers `first_layer` .. `first_layer + num_layers`."""

    attempt_id: str
    first_layer: int
    num_layers: int
    first_page: int
    num_pages: int

    @property
    def num_layer_pages(self) -> int:
        return self.num_layers * self.num_pages


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[KvNotice, ...])


def encode_notices(notices: Sequence[KvNotice]) -> bytes:
    """The message of one transfer."""
    return _ENCODER.encode(notices)


def decode_notices(message: bytes) -> tuple[KvNotice, ...]:
    """ValueError for a message that is not a list of notices."""
    try:
        return _DECODER.decode(message)
    except msgspec.DecodeError as error:
        raise ValueError(f"malformed KV notice: {error}") from error
