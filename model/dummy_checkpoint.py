"""Random weights in place of a checkpoint's: speed and memory of a model whose weights are not at
hand.

    DeepseekV3.load(folder, ..., source=DummyCheckpoint(folder, device))

The folder needs config.json only. Tensors have the names, shapes and types that a checkpoint of
this `quantization_config` has, and are made on the device when they are read, each from a
generator that its name seeds: the same on every rank of one kind of device.

What is computed with them is like a trained model's where time depends on it. Matrices are normal
with a variance of one over their inputs, so that hidden states neither vanish nor grow; FP8 and
int4 values use the range of their type; gates are random too and their bias is zero, so that
tokens spread over all experts.
"""

import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from kernels.block_dequantise import BLOCK
from model.checkpoint import FP8_TYPE, Checkpoint, Stored
from model.config import Fields, ModelConfig
from model.tensor_names import EMBEDDING, SCALE_SUFFIX, Shapes, main_tensors, mtp_tensors
from model.w4afp8 import (
    GROUP,
    QUANT_METHOD,
    has_static_inputs,
    input_scale_name,
    is_routed_weight,
)

INT4_TYPE = "I8"
ITEMSIZES = {"F32": 4, "BF16": 2, FP8_TYPE: 1, INT4_TYPE: 1}
# Standard deviation of FP8 values: 448, the largest of the type, is seven of them.
FP8_SPREAD = 64.0
FP8_LARGEST = 448.0
INT4_LARGEST = 7
INT4_SPREAD = math.sqrt(((2 * INT4_LARGEST + 1) ** 2 - 1) / 12)
# Of the inputs of a product with static scales: their largest value, some nine, is FP8's largest.
INPUT_SCALE = 0.02


class DummyCheckpoint(Checkpoint):
    """`quant_method` of config.json says what it has: none, BF16 only; fp8; w4afp8."""

    def __init__(self, folder: str | Path, device: str | torch.device = "cpu") -> None:
        """CheckpointError for a config.json that is none."""
        self.folder = Path(folder)
        self.stored = dummy_tensors(self.folder)
        self._device = torch.device(device)

    def close(self) -> None:
        """Nothing is open."""

    def raw(self, name: str) -> torch.Tensor:
        """As a checkpoint would store it, on the device."""
        stored = self.stored[name]
        self.bytes_read += self.num_bytes(name)
        generator = torch.Generator(self._device)
        generator.manual_seed(zlib.crc32(name.encode()))
        options = {"generator": generator, "device": self._device}
        if name.endswith(SCALE_SUFFIX):
            # Blocks differ by up to a fourth; by the mean they make the matrix what it should be.
            of_matrix = self.stored[name.removesuffix(SCALE_SUFFIX)]
            scales = torch.rand(stored.shape, **options) * 0.5 + 0.75
            return scales * _scale_of(of_matrix)
        if name.endswith("input_scale"):
            return torch.full(stored.shape, INPUT_SCALE, device=self._device)
        if stored.dtype == FP8_TYPE:
            values = torch.randn(stored.shape, dtype=torch.bfloat16, **options).mul_(FP8_SPREAD)
            return values.clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
        if stored.dtype == INT4_TYPE:
            low, high = (
                torch.randint(-INT4_LARGEST, INT4_LARGEST + 1, stored.shape, dtype=torch.int8,
                              **options)
                for _ in range(2)
            )  # fmt: skip
            return high.bitwise_left_shift_(4).bitwise_or_(low.bitwise_and_(15))
        if len(stored.shape) == 1:
            value = 1.0 if name.endswith("norm.weight") else 0.0
            dtype = torch.float32 if stored.dtype == "F32" else torch.bfloat16
            return torch.full(stored.shape, value, dtype=dtype, device=self._device)
        values = torch.randn(stored.shape, dtype=torch.bfloat16, **options)
        is_embedding = name == EMBEDDING or name.endswith("embed_tokens.weight")
        return values if is_embedding else values.mul_(stored.shape[-1] ** -0.5)


def dummy_tensors(folder: Path) -> dict[str, Stored]:
    """Headers as those of a checkpoint whose config.json the folder has."""
    config = ModelConfig.from_folder(folder)
    quantization = Fields.read(folder / "config.json").values.get("quantization_config") or {}
    shapes: Shapes = main_tensors(config)
    for depth in range(config.num_mtp_layers):
        shapes |= mtp_tensors(config, depth)[0]
    method = quantization.get("quant_method", "")
    static = method == QUANT_METHOD and has_static_inputs(quantization)
    stored: dict[str, Stored] = {}
    begin = 0
    for name, shape in shapes.items():
        for stored_name, dtype, stored_shape in _stored_as(name, shape, method, static):
            end = begin + ITEMSIZES[dtype] * math.prod(stored_shape)
            stored[stored_name] = Stored(folder, dtype, stored_shape, (begin, end))
            begin = end
    return stored


def _stored_as(
    name: str, shape: tuple[int, ...], method: str, static: bool
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, type, shape) of all that one tensor consists of."""
    if name.endswith("e_score_correction_bias"):
        yield name, "F32", shape
    elif method == QUANT_METHOD and is_routed_weight(name):
        rows, columns = shape
        yield name, INT4_TYPE, (rows, columns // 2)
        yield name + SCALE_SUFFIX, "F32", (rows, columns // GROUP)
        if static:
            yield input_scale_name(name), "F32", ()
    elif method and name.endswith(("_proj.weight", "_with_mqa.weight")) and ".eh_proj." not in name:
        rows, columns = shape
        yield name, FP8_TYPE, shape
        yield name + SCALE_SUFFIX, "F32", (-(-rows // BLOCK), -(-columns // BLOCK))
    else:
        yield name, "BF16", shape


def _scale_of(matrix: Stored) -> float:
    """What the values of a matrix are multiplied by, for a variance of one over its inputs."""
    columns = matrix.shape[1]
    if matrix.dtype == INT4_TYPE:
        return float((2 * columns) ** -0.5 / INT4_SPREAD)
    return float(columns**-0.5 / FP8_SPREAD)
