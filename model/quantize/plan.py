"""What each file of a quantised checkpoint will hold, known before a weight is read."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import CheckpointError
from model.config import ModelConfig
from model.w4afp8 import GROUP, QUANT_METHOD, input_scale_name, is_routed_weight
from model.weights.checkpoint import Checkpoint
from model.weights.stored import Stored
from model.weights.tensor_names import SCALE_SUFFIX

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2,
    "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One that will be written; dtype as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Shard:
    """A file, named as the one that it is made from. `copied` tensors stay as they are, of each of
    `quantised` three are made (`made`)."""

    name: str
    copied: tuple[Tensor, ...]
    quantised: tuple[str, ...]
    made: tuple[Tensor, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order in which the file holds them: by alignment, then by name."""
        everything = (*self.copied, *self.made)
        return tuple(sorted(everything, key=lambda one: (-ITEM_BYTES[one.dtype], one.name)))

    @property
    def num_bytes(self) -> int:
        """Without the header."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def plan_shards(checkpoint: Checkpoint, config: ModelConfig) -> tuple[Shard, ...]:
    """All files to write, those that would be empty left out.

    CheckpointError for a model that cannot be quantised: tensors that do not fit, experts that
    are int4 already or whose sizes the format has no groups for, no experts.
    """
    checkpoint.check(config)
    _check_sizes(checkpoint.folder, config)
    stored = checkpoint.stored
    routed = {name for name in stored if is_routed_weight(name)}
    for name in stored:
        if checkpoint.is_int4(name):
            raise CheckpointError(f"{checkpoint.folder} is int4 already: {name}")
    replaced = routed | {name + SCALE_SUFFIX for name in routed}
    replaced |= {input_scale_name(name) for name in routed}
    by_file: dict[str, list[str]] = {}
    for name, one in stored.items():
        if one.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{checkpoint.folder}: {name} has dtype {one.dtype}")
        by_file.setdefault(one.file.name, []).append(name)
    shards = []
    for file, names in sorted(by_file.items()):
        quantised = tuple(sorted(name for name in names if name in routed))
        shard = Shard(
            name=file,
            copied=tuple(
                Tensor(name, stored[name].dtype, stored[name].shape)
                for name in sorted(names)
                if name not in replaced
            ),
            quantised=quantised,
            made=tuple(tensor for name in quantised for tensor in made_of(name, stored[name])),
        )
        if shard.tensors:
            shards.append(shard)
    return tuple(shards)


def made_of(name: str, stored: Stored) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, scales and input scale of a routed expert's matrix."""
    rows, columns = stored.shape
    return (
        Tensor(name, "I8", (rows, columns // 2)),
        Tensor(name + SCALE_SUFFIX, "BF16", (rows, columns // GROUP)),
        Tensor(input_scale_name(name), "F32", ()),
    )


def quantised_config(fields: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json of the result, from that of the source."""
    quantization: dict[str, Any] = {
        "quant_method": QUANT_METHOD,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "moe_activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "group_size": GROUP,
    }
    left = unquantised_modules(checkpoint)
    if left:
        quantization["modules_to_not_convert"] = left
    return fields | {"quantization_config": quantization}


def unquantised_modules(checkpoint: Checkpoint) -> list[str]:
    """Projections that are not FP8: readers take all for FP8 that are not named."""
    endings = ("_proj.weight", "_with_mqa.weight")
    return sorted(
        name.removesuffix(".weight")
        for name, one in checkpoint.stored.items()
        if name.endswith(endings)
        and not is_routed_weight(name)
        and name + SCALE_SUFFIX not in checkpoint.stored
        and not one.dtype.startswith("F8")
    )


def _check_sizes(folder: Path, config: ModelConfig) -> None:
    if not config.num_moe_layers:
        raise CheckpointError(f"{folder} has no routed experts, and nothing else becomes int4")
    for name in ("hidden_size", "moe_intermediate_size"):
        size = getattr(config, name)
        if size % GROUP:
            raise CheckpointError(
                f"{folder}: {name} is {size}; {QUANT_METHOD} has scales for groups of {GROUP} "
                f"weights and no smaller ones, so it has to be a multiple of {GROUP}"
            )
