"""Random weights in place of a checkpoint's: speed and memory of a model whose weights are not at
hand.

    DeepseekV3.load(folder, ..., source=DummyCheckpoint(folder, device))

The folder needs config.json only. Tensors have the names, shapes and types that a checkpoint of
this `quantization_config` has, and are made on the device when they are read, each from a
generator that its name seeds: the same on every rank of one kind of device.

What is computed with them takes as long as a trained model's. Matrices are normal with a variance
of one over their inputs, so that hidden states neither vanish nor grow. FP8 and int4 values are
spread as those of a quantised normal matrix, since power, and with it speed, depends on the bits
that change. So are the inputs of products with static scales: of 512 normal tokens through three
experts of DeepSeek-V3's sizes none is clipped, 1.1e-5 of the values become zero before gate_up,
4.1e-4 before down, and both are 2.65% off by norm, as with scales of their own. Gates are random
and their bias is zero: tokens spread over all experts.
"""

import math
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from kernels.gemm.block_dequantise import BLOCK
from model.checkpoint_formats import AS_FP8, INT4_METHODS
from model.config import ModelConfig, quantization_of_folder
from model.w4afp8 import (
    GROUP,
    QUANT_METHOD,
    has_static_inputs,
    input_scale_name,
    is_routed_weight,
    weight_of_input_scale,
)
from model.weights.checkpoint import Checkpoint
from model.weights.int4 import LARGEST, pack_nibbles
from model.weights.stored import FP8_TYPE, Stored
from model.weights.tensor_names import EMBEDDING, SCALE_SUFFIX, Shapes, main_tensors, mtp_tensors

INT4_TYPE = "I8"
ITEMSIZES = {"F32": 4, "BF16": 2, FP8_TYPE: 1, INT4_TYPE: 1}
FP8_LARGEST = 448.0
# Standard deviation of FP8 values: the largest of 128 x 128 normal ones is 4.13 of them.
FP8_SPREAD = FP8_LARGEST / 4.13
# Of int4 values, each group of 128 rounded in steps of a seventh of its largest.
INT4_SPREAD = 2.54
# Of the inputs of products with static scales, as calibration with some hundred tokens finds them:
# the largest, of normal values 5.6 and of what is activated 13.4, become FP8's largest.
INPUT_SCALES = {"gate_proj": 0.0125, "up_proj": 0.0125, "down_proj": 0.03}


class DummyCheckpoint(Checkpoint):
    """`quant_method` of config.json says what it has: none, BF16 only; fp8; w4afp8. Of other int4
    methods experts are int4, the rest BF16, as `Checkpoint` reads them."""

    def __init__(self, folder: str | Path, device: str | torch.device = "cpu") -> None:
        """CheckpointError for a config.json that is none."""
        self.folder = Path(folder)
        self.stored = dummy_tensors(self.folder)
        self._device = torch.device(device)

    def close(self) -> None:
        """Nothing is open."""

    def read_ahead(self, names: Collection[str]) -> None:
        """There is nothing to wait for."""
        self.bytes_planned = sum(map(self.num_bytes, names))

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
            projection = weight_of_input_scale(name).split(".")[-2]
            return torch.full(stored.shape, INPUT_SCALES[projection], device=self._device)
        if stored.dtype == FP8_TYPE:
            values = torch.randn(stored.shape, dtype=torch.bfloat16, **options).mul_(FP8_SPREAD)
            return values.clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
        if stored.dtype == INT4_TYPE:
            rows, columns = stored.shape[0], 2 * stored.shape[1]
            groups = torch.randn(rows, columns // GROUP, GROUP, **options)
            return pack_nibbles(rounded_by_largest(groups).flatten(1))
        if len(stored.shape) == 1:
            value = 1.0 if name.endswith("norm.weight") else 0.0
            dtype = torch.float32 if stored.dtype == "F32" else torch.bfloat16
            return torch.full(stored.shape, value, dtype=dtype, device=self._device)
        values = torch.randn(stored.shape, dtype=torch.bfloat16, **options)
        is_embedding = name == EMBEDDING or name.endswith("embed_tokens.weight")
        return values if is_embedding else values.mul_(stored.shape[-1] ** -0.5)


def rounded_by_largest(groups: torch.Tensor) -> torch.Tensor:
    """Whole numbers of -7 to 7, float32 [..., 128] as `groups` and in their place: each group in
    steps of a seventh of its largest."""
    largest = torch.linalg.vector_norm(groups, ord=math.inf, dim=-1, keepdim=True)
    return groups.mul_(LARGEST / largest).round_()


def dummy_tensors(folder: Path) -> dict[str, Stored]:
    """Headers as those of a checkpoint whose config.json the folder has."""
    config = ModelConfig.from_folder(folder)
    quantization = quantization_of_folder(folder)
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
    elif method in INT4_METHODS and is_routed_weight(name):
        rows, columns = shape
        yield name, INT4_TYPE, (rows, columns // 2)
        yield name + SCALE_SUFFIX, "F32", (rows, columns // GROUP)
        if static:
            yield input_scale_name(name), "F32", ()
    elif (
        method in AS_FP8
        and name.endswith(("_proj.weight", "_with_mqa.weight"))
        and ".eh_proj." not in name
    ):
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
