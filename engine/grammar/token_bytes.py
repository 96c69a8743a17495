"""The bytes that each token of a checkpoint stands for."""

import json
from pathlib import Path
from typing import NamedTuple

from core.byte_level import BYTE_OF_CHARACTER
from core.errors import CheckpointError


class TokenBytes(NamedTuple):
    """texts    one entry a token id; empty for ids that are no text by themselves
    marks    text of added tokens (<think>): they stand for more than the same characters one by
             one
    special  those of them that do not show
    """

    texts: list[bytes]
    marks: dict[int, str]
    special: frozenset[int]


def token_bytes(folder: Path, vocab_size: int | None) -> TokenBytes:
    """`vocab_size` entries; None: as many as there are. Raises CheckpointError when tokenizer.json
    is missing, broken, or not byte-level BPE."""
    path = folder / "tokenizer.json"
    try:
        fields = json.loads(path.read_bytes())
        vocab: dict[str, int] = fields["model"]["vocab"]
        added = [(one["id"], one["content"], one["special"]) for one in fields["added_tokens"]]
        decoder = fields["decoder"]["type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error!r}") from error
    if decoder != "ByteLevel":
        raise CheckpointError(f"{path}: the decoder is {decoder}, not ByteLevel")
    added_ids = {token_id for token_id, _, _ in added}
    if vocab_size is None:
        vocab_size = max(*vocab.values(), *added_ids) + 1
    entries = [b""] * vocab_size
    for text, token_id in vocab.items():
        if token_id < vocab_size and token_id not in added_ids:
            entries[token_id] = bytes(BYTE_OF_CHARACTER[character] for character in text)
    marks = {i: text for i, text, _ in added if i < vocab_size}
    return TokenBytes(entries, marks, frozenset(i for i, _, special in added if special))
