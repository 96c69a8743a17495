"""A checkpoint of DeepSeek-V3's sizes on a disk, to measure how fast it is loaded.

    write_checkpoint(folder, device)      # folder has a config.json

Tensors of one kind and shape have the same values, made up as `DummyCheckpoint` does it. A file a
layer, of tensors in the order of their names, as public checkpoints have them.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import torch

from model.weights.dummy_checkpoint import DummyCheckpoint
from model.weights.stored import INDEX

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NUMBER = re.compile(r"\d+")


def write_checkpoint(folder: Path, device: torch.device) -> None:
    """OSError where there is no room."""
    source = DummyCheckpoint(folder, device)
    files: dict[str, list[str]] = defaultdict(list)
    for name in sorted(source.stored):
        layer = _LAYER.match(name)
        files[f"model-{layer[1] if layer else 'rest'}.safetensors"].append(name)
    made: dict[str, bytes] = {}
    for file, names in files.items():
        _write_file(source, folder / file, names, made)
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def _write_file(
    source: DummyCheckpoint, path: Path, names: list[str], made: dict[str, bytes]
) -> None:
    """`made` are bytes by kind of tensor."""
    header, begin = {}, 0
    for name in names:
        stored, end = source.stored[name], begin + source.num_bytes(name)
        header[name] = {
            "dtype": stored.dtype, "shape": stored.shape, "data_offsets": (begin, end)
        }  # fmt: skip
        begin = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            kind = f"{_NUMBER.sub('', name)} {source.stored[name].shape}"
            if kind not in made:
                made[kind] = bytes(source.raw(name).cpu().reshape(-1).view(torch.uint8).numpy())
            file.write(made[kind])
