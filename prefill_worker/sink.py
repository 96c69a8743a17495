"""Where an attempt's KV goes: the sink of a request, checked and unpacked."""

from dataclasses import dataclass

import msgspec

from core.errors import InvalidRequest, Mismatch
from engine.kv.pages import pages_of
from engine.link.messages import Sink
from transfer.api import AgentDescriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGeometry:
    """[L, pages, page_tokens, kv_dim]; equal on both sides but for the number of pages.

    page_bytes  of one page in one layer
    """

    num_layers: int
    page_tokens: int
    page_bytes: int
    kv_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkPages:
    """`pages` are page ids in the peer's pool of `num_pool_pages`, in token order."""

    peer: AgentDescriptor
    num_pool_pages: int
    pages: tuple[int, ...]


def unpack_sink(sink: Sink, num_tokens: int, geometry: KvGeometry) -> SinkPages:
    """Raises Mismatch for another kind of KV, InvalidRequest for pages that cannot be right.

    After this, no offset of a transfer lies outside the peer's buffer.
    """
    if sink.kv_fingerprint != geometry.kv_fingerprint:
        raise Mismatch(
            f"KV fingerprint {sink.kv_fingerprint!r} of the sink is not this worker's "
            f"{geometry.kv_fingerprint!r}"
        )
    try:
        peer = msgspec.msgpack.decode(sink.agent, type=AgentDescriptor)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"malformed agent descriptor: {error}", param="sink") from error
    num_pool_pages, rest = divmod(peer.num_bytes, geometry.num_layers * geometry.page_bytes)
    if rest or num_pool_pages < 1:
        raise InvalidRequest(
            f"a buffer of {peer.num_bytes} bytes is not {geometry.num_layers} layers of pages of "
            f"{geometry.page_bytes} bytes",
            param="sink",
        )
    needed = -(-num_tokens // geometry.page_tokens)
    num_pages = sum(run.count for run in sink.runs)
    if num_pages != needed:
        raise InvalidRequest(
            f"the sink has {num_pages} pages, {num_tokens} tokens need {needed}", param="sink"
        )
    for run in sink.runs:
        if run.first < 0 or run.count < 1 or run.first + run.count > num_pool_pages:
            raise InvalidRequest(
                f"run of {run.count} pages from {run.first} is not within the peer's "
                f"{num_pool_pages} pages",
                param="sink",
            )
    pages = tuple(pages_of(sink.runs))
    if len(set(pages)) != len(pages):
        raise InvalidRequest("the sink names a page twice", param="sink")
    return SinkPages(peer=peer, num_pool_pages=num_pool_pages, pages=pages)
