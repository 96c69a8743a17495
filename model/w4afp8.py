"""The public `w4afp8` layout of routed experts: names, shapes, types. Torch-free.

Of each expert, and each projection of it ([N, K] with N and K multiples of 128):

    experts.3.gate_proj.weight            [N, K / 2]    int8: two's complement nibbles, column 2i
                                                        low and 2i + 1 high
    experts.3.gate_proj.weight_scale_inv  [N, K / 128]  float: weight = value * scale
    experts.3.w1.input_scale              []            float: activation = FP8 value * scale

with w1, w2 and w3 for gate, down and up. Everything else is as in an FP8 (or BF16) checkpoint.
"""

from collections.abc import Mapping
from typing import Any

GROUP = 128
QUANT_METHOD = "w4afp8"
# As safetensors names them; the bits are the same.
INT4_TYPES = ("I8", "U8")
# Public writers name the scale of a projection's input otherwise than its weight.
INPUT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

_EXPERTS = ".mlp.experts."
_INPUT_SUFFIX = ".input_scale"
_PROJECTIONS = {short: projection for projection, short in INPUT_NAMES.items()}


def is_routed_weight(name: str) -> bool:
    """Whether a tensor is a matrix of a routed expert."""
    return _EXPERTS in name and name.endswith("_proj.weight")


def input_scale_name(weight: str) -> str:
    """Of a matrix: ....experts.3.gate_proj.weight -> ....experts.3.w1.input_scale"""
    stem, projection, _ = weight.rsplit(".", 2)
    return f"{stem}.{INPUT_NAMES[projection]}{_INPUT_SUFFIX}"


def weight_of_input_scale(name: str) -> str:
    """The other way round; any other name stays as it is."""
    if _EXPERTS not in name or not name.endswith(_INPUT_SUFFIX):
        return name
    stem, _, short = name.removesuffix(_INPUT_SUFFIX).rpartition(".")
    return f"{stem}.{_PROJECTIONS.get(short, short)}.weight"


def int4_problem(
    name: str,
    stored_shape: tuple[int, ...],
    scale_shape: tuple[int, ...] | None,
    shape: tuple[int, ...],
) -> str:
    """What is wrong with an int4 matrix [N, K] = `shape`, or nothing; `scale_shape` is None
    where there are no scales. Products with int4 are of experts only: other matrices may have any
    number of rows."""
    rows, columns = shape
    if columns % GROUP or (rows % GROUP and is_routed_weight(name)):
        return f"{name} is int4, but {rows} x {columns} are no multiples of {GROUP}"
    wanted, groups = (rows, columns // 2), (rows, columns // GROUP)
    if stored_shape != wanted:
        return f"{name} is int4 {list(stored_shape)}, not {list(wanted)}"
    if scale_shape is None:
        return f"{name} is int4 without {name}_scale_inv"
    if scale_shape != groups:
        return f"{name}_scale_inv is {list(scale_shape)}, not {list(groups)}"
    return ""


def has_static_inputs(quantization: Mapping[str, Any]) -> bool:
    """Whether `quantization_config` asks for one scale for all activations of a projection, the
    largest `input_scale` of the layer; else each 128 values have their own."""
    return quantization.get("moe_activation_scheme") == "static"
