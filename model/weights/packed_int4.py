"""Int4 matrices as AWQ, GPTQ and compressed-tensors pack them, read as `w4afp8` has them.

Of a matrix [N, K] there are unsigned values q of 4 bits, eight to an int32, the first in the lowest
bits, and for each 128 along K a scale s and a zero point z: weight = (q - z) * s.

    AWQ    qweight [K, N / 8], qzeros [K / 128, N / 8]: place i of word c is column 8 c + ORDER[i]
           scales [K / 128, N]
    GPTQ   qweight [K / 8, N]: place i of word r is row 8 r + i
           qzeros [K / 128, N / 8]: place i of word c is column 8 c + i, with z - 1; `gptq_v2`: z
           scales [K / 128, N], g_idx [K]: the group of each row, k / 128 unless in act-order
    compressed-tensors, pack-quantized
           weight_packed [N, K / 8]: place i of word c is column 8 c + i
           weight_zero_point [N / 8, K / 128]: place i of word r is row 8 r + i
           weight_scale [N, K / 128], weight_g_idx [K], weight_shape [2], which is not needed

As they are packed by autoawq 0.2.9 (WQLinear_GEMM), auto-gptq 0.7.1 (qlinear_cuda) and
compressed-tensors 0.20.0 (PackedQuantizationCompressor).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from model.checkpoint_formats import AWQ, COMPRESSED_TENSORS, GPTQ
from model.weights.int4 import pack_nibbles
from model.weights.stored import Arrange, Stored
from model.weights.tensor_names import ORDER_SUFFIX, SCALE_SUFFIX, ZERO_SUFFIX

Shape = tuple[int, ...]

SYMMETRIC = 8  # the zero point of values that are signed ones plus 8
# Where each of eight columns is: the inverse of AWQ's ORDER, 0 2 4 6 1 3 5 7.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_SIGN_BITS = 0x88 - 0x100  # as int8; turned over, they take 8 from both values of a byte
_WORDS = "I32"
# What words are read as.
_READ_AS = {"": "I8", ZERO_SUFFIX: "U8", ORDER_SUFFIX: _WORDS}


class _Part(NamedTuple):
    """The end of a tensor's new name behind `.weight`, its new shape, and how it comes to that."""

    suffix: str
    shape: Callable[[Shape], Shape]
    arrange: Arrange


def unpacked(stored: Mapping[str, Stored], quantization: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors of a folder by the names and shapes of the `w4afp8` format. What is not packed as
    its `quantization_config` says stays as it is."""
    parts = _parts(quantization)
    found: dict[str, Stored] = {}
    for name, one in stored.items():
        stem, _, last = name.rpartition(".")
        part = parts.get(last)
        if part is None or not _fits(one, part):
            found[name] = one
        else:
            dtype = _READ_AS.get(part.suffix, one.dtype)
            found[f"{stem}.weight{part.suffix}"] = replace(
                one, dtype=dtype, shape=part.shape(one.shape), arrange=part.arrange
            )
    if quantization.get("quant_method") == COMPRESSED_TENSORS:
        found = {name: one for name, one in found.items() if not name.endswith(".weight_shape")}
    return found


def _fits(stored: Stored, part: _Part) -> bool:
    is_words = stored.dtype == _WORDS or part.suffix == SCALE_SUFFIX
    return is_words and len(stored.shape) == (1 if part.suffix == ORDER_SUFFIX else 2)


def _parts(quantization: Mapping[str, Any]) -> dict[str, _Part]:
    """By the last part of a stored tensor's name."""
    method = quantization.get("quant_method")
    order = _Part(ORDER_SUFFIX, lambda shape: shape, torch.Tensor.view)
    scales = _Part(SCALE_SUFFIX, lambda shape: shape[::-1], _transposed)
    if method == AWQ:
        return {
            "qweight": _Part("", lambda shape: (8 * shape[1], shape[0] // 2), _awq_values),
            "qzeros": _Part(ZERO_SUFFIX, lambda shape: (8 * shape[1], shape[0]), _awq_zeros),
            "scales": scales,
        }
    if method == GPTQ:
        less = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
        zeros = partial(_gptq_zeros, less=less)
        return {
            "qweight": _Part("", lambda shape: (shape[1], 4 * shape[0]), _gptq_values),
            "qzeros": _Part(ZERO_SUFFIX, lambda shape: (8 * shape[1], shape[0]), zeros),
            "scales": scales,
            "g_idx": order,
        }
    if method == COMPRESSED_TENSORS:
        return {
            "weight_packed": _Part("", lambda shape: (shape[0], 4 * shape[1]), _values),
            "weight_zero_point": _Part(
                ZERO_SUFFIX, lambda shape: (8 * shape[0], shape[1]), _row_zeros
            ),
            "weight_scale": _Part(SCALE_SUFFIX, lambda shape: shape, torch.Tensor.view),
            "weight_g_idx": order,
        }
    return {}


def _values(flat: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Rows of words: signed values, even columns in the low halves of bytes."""
    return flat.view(shape) ^ _SIGN_BITS


def _gptq_values(flat: torch.Tensor, shape: Shape) -> torch.Tensor:
    words = flat.view(torch.int32).view(-1, shape[0]).t().contiguous()
    return _values(words.view(torch.int8), shape)


def _awq_values(flat: torch.Tensor, shape: Shape) -> torch.Tensor:
    columns = _awq_columns(flat, 2 * shape[1])
    return pack_nibbles(columns.t().to(torch.int8) - SYMMETRIC)


def _awq_zeros(flat: torch.Tensor, shape: Shape) -> torch.Tensor:
    return _awq_columns(flat, shape[1]).t()


def _gptq_zeros(flat: torch.Tensor, shape: Shape, *, less: int) -> torch.Tensor:
    return (_nibbles(flat.view(shape[1], -1)).t() + less) & 0x0F


def _row_zeros(flat: torch.Tensor, shape: Shape) -> torch.Tensor:
    words = flat.view(torch.int32).view(-1, shape[1]).t().contiguous()
    return _nibbles(words.view(torch.uint8)).t()


def _transposed(flat: torch.Tensor, shape: Shape) -> torch.Tensor:
    return flat.view(shape[::-1]).t().contiguous()


def _awq_columns(flat: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows, N] uint8."""
    eights = _nibbles(flat.view(torch.uint8).view(num_rows, -1)).unflatten(1, (-1, 8))
    return eights[..., _AWQ_PLACES].flatten(1)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """[R, B] uint8 to [R, 2 B], low halves first: words are little-endian."""
    return torch.stack((data & 0x0F, data >> 4), dim=-1).flatten(1)
