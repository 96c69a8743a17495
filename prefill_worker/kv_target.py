"""Where an attempt's KV goes, checked and unpacked."""

from dataclasses import dataclass

import msgspec

from core.errors import InvalidRequest, Mismatch
from engine.kv.pages import pages_of
from engine.link.messages import KvTarget
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
class TargetPages:
    """`pages` are page ids in the peer's pool of `num_pool_pages`, in token order."""

    peer: AgentDescriptor
    num_pool_pages: int
    pages: tuple[int, ...]


def unpack_target(target: KvTarget, num_tokens: int, geometry: KvGeometry) -> TargetPages:
    """Raises Mismatch for another kind of KV, InvalidRequest for pages that cannot be right.

    After this, no offset of a transfer lies outside the peer's buffer.
    """
    if target.kv_fingerprint != geometry.kv_fingerprint:
        raise Mismatch(
            f"KV fingerprint {target.kv_fingerprint!r} of the target is not this worker's "
            f"{geometry.kv_fingerprint!r}"
        )
    try:
        peer = msgspec.msgpack.decode(target.agent, type=AgentDescriptor)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"malformed agent descriptor: {error}", param="kv_target") from error
    num_pool_pages, rest = divmod(peer.num_bytes, geometry.num_layers * geometry.page_bytes)
    if rest or num_pool_pages < 1:
        raise InvalidRequest(
            f"a buffer of {peer.num_bytes} bytes is not {geometry.num_layers} layers of pages of "
            f"{geometry.page_bytes} bytes",
            param="kv_target",
        )
    needed = -(-num_tokens // geometry.page_tokens)
    num_pages = sum(run.count for run in target.runs)
    if num_pages != needed:
        raise InvalidRequest(
            f"the KV target has {num_pages} pages, {num_tokens} tokens need {needed}",
            param="kv_target",
        )
    for run in target.runs:
        if run.first < 0 or run.count < 1 or run.first + run.count > num_pool_pages:
            raise InvalidRequest(
                f"run of {run.count} pages from {run.first} is not within the peer's "
                f"{num_pool_pages} pages",
                param="kv_target",
            )
    pages = tuple(pages_of(target.runs))
    if len(set(pages)) != len(pages):
        raise InvalidRequest("the KV target names a page twice", param="kv_target")
    return TargetPages(peer=peer, num_pool_pages=num_pool_pages, pages=pages)
