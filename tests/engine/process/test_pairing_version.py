"""The version by which workers are paired: what hangs on it does not change behind its back."""

import hashlib
from typing import Any

import msgspec
import torch
from google.protobuf.descriptor import Descriptor

from engine.link.kv_notice import KvNotice
from engine.process import pairing_version as pairing
from engine.sampling.uniform import uniform
from proto import generate_pb2
from transfer.api import AgentDescriptor

# Of what the roles say to each other and draw, by version. A new one: can workers from before be
# paired with those of today? If not, raise the version; add it here either way.
# The second came with thoughts before a grammar, which a worker from before leaves out; the third
# with grammars in Lark, which one from before would take for none. Tokens that begin a grammar came
# later: a worker that does not know them begins it as all did before.
DIGESTS = {
    1: {"620e0010bbd4f9bd", "64bfcf95f80434f6"},
    2: {"4e4fe5487e1d6b79", "4b9b024e69c47782"},
}


def _fields(message: Descriptor) -> dict[str, Any]:
    """Numbers and types by name, those of messages within included."""
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            _fields(field.message_type) if field.message_type else None,
        )
        for field in message.fields
    }


def digest() -> str:
    messages = (
        generate_pb2.PrefillRequest,
        generate_pb2.PrefillResponse,
        generate_pb2.AbortRequest,
    )
    said = [_fields(message.DESCRIPTOR) for message in messages]
    structs = [
        [
            (field.encode_name, str(field.type), field.required)
            for field in msgspec.structs.fields(one)
        ]
        for one in (KvNotice, AgentDescriptor)
    ]
    drawn = uniform(torch.arange(4), torch.arange(4)).tolist()
    return hashlib.sha256(msgspec.json.encode([said, structs, drawn])).hexdigest()[:16]


def test_what_workers_say_to_each_other_is_of_this_version() -> None:
    assert digest() in DIGESTS[pairing.PAIRING_VERSION]


def test_it_names_the_library_that_moves_kv() -> None:
    own, library = pairing.pairing_version().split("+")
    assert int(own) == pairing.PAIRING_VERSION
    assert library.startswith("nixl-")
