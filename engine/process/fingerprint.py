"""What two workers must have in common for KV pages of one to mean something to the other."""

import hashlib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from core.errors import CheckpointError
from model.config import ModelConfig

# To be raised whenever the bytes of a page come to mean something else.
# 1: [layer, page, token, kv_dim], a latent = normalised compressed KV, then the rotated key.
LAYOUT_VERSION = 1

# Weights are told apart by samples: reading 700 GB to start would be too dear, and headers
# alone are equal for any two trainings of one architecture.
SAMPLES_A_FILE = 16
SAMPLE_BYTES = 4096


def kv_fingerprint(
    folder: Path,
    config: ModelConfig,
    *,
    dtype_name: str,
    page_tokens: int,
    revision: str | None = None,
) -> str:
    """32 hexadecimal digits, equal for workers that may be paired.

    Covers the model's configuration, dtype, page size, layout and the checkpoint's revision, or
    `revision` where the weights are not the folder's. Raises CheckpointError when the folder
    cannot be read.
    """
    shape = {
        "layout": LAYOUT_VERSION,
        "dtype": dtype_name,
        "page_tokens": page_tokens,
        # Whoever drafts is paired with whoever computes the KV for it.
        "config": settings_of(replace(config, mtp="kv") if config.mtp == "whole" else config),
        "revision": checkpoint_revision(folder) if revision is None else revision,
    }
    return hashlib.sha256(msgspec.json.encode(shape, order="sorted")).hexdigest()[:32]


def settings_of(config: Any) -> dict[str, Any]:  # noqa: ANN401 - any of the configuration's parts
    """What a configuration says that its defaults do not: a setting that a later version of the
    software adds, with what was always so as its default, leaves fingerprints as they are, and
    workers of both versions can be paired while they are replaced one by one."""
    return {
        each.name: settings_of(value) if is_dataclass(value) else value
        for each in fields(config)
        if (value := getattr(config, each.name)) != each.default
    }


def checkpoint_revision(folder: Path) -> str:
    """Hash over names, sizes, headers and samples of the folder's safetensors files."""
    digest = hashlib.sha256()
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} has no safetensors files")
    for path in paths:
        try:
            _add_file(digest, path)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    """The header begins with its own length; samples are spread evenly over the rest."""
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        size_bytes = file.seek(0, 2)
        digest.update(f"{path.name} {size_bytes} ".encode() + prefix)
        file.seek(8)
        digest.update(file.read(min(header_bytes, size_bytes)))
        begin = min(8 + header_bytes, size_bytes)
        stride = max((size_bytes - begin) // SAMPLES_A_FILE, SAMPLE_BYTES)
        for offset in range(begin, size_bytes, stride):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
