"""Forms in which checkpoints are read, and what their config.json may say of them. Torch-free.

The table of formats in docs/quantization.md is made of these by scripts/formats_doc.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from model.w4afp8 import GROUP, QUANT_METHOD

FP8_BLOCK = 128  # edge of the square weight blocks that share one scale
# Readers of int4 matrices that others than `ctl quantize` have packed.
AWQ, GPTQ, COMPRESSED_TENSORS = "awq", "gptq", "compressed-tensors"
INT4_METHODS = (QUANT_METHOD, AWQ, GPTQ, COMPRESSED_TENSORS)
AS_FP8 = ("fp8", QUANT_METHOD)  # of which what is no expert is FP8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """method        `quant_method` in config.json; "" where there is no quantization_config
    experts, rest    how matrices are stored, and what becomes of them
    tensors          those of a matrix, by the ends of their names
    fields           what else quantization_config may say, by dotted name, `*` being any key; None
                     stands for a field that is left out
    """

    method: str
    experts: str
    rest: str
    tensors: tuple[str, ...]
    fields: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


_AS_INT4 = "int4 or BF16; int4 becomes BF16 at load"
FORMATS = (
    CheckpointFormat(
        method="", experts="BF16, F16 or F32", rest="BF16, F16 or F32", tensors=("weight",)
    ),
    CheckpointFormat(
        method="fp8",
        experts="e4m3, a scale per 128 x 128 (BF16, F16, F32 or E8M0)",
        rest="the same; embeddings, head, norms and gates BF16",
        tensors=("weight", "weight_scale_inv"),
        fields={"weight_block_size": ([FP8_BLOCK, FP8_BLOCK],)},
    ),
    CheckpointFormat(
        method=QUANT_METHOD,
        experts="int4, a scale per 128 along K",
        rest="as in either of the others",
        tensors=("weight", "weight_scale_inv", "input_scale"),
        # Public writers leave these out.
        fields={
            "weight_block_size": ([FP8_BLOCK, FP8_BLOCK], None),
            "group_size": (GROUP, None),
        },
    ),
    CheckpointFormat(
        method=AWQ,
        experts="int4, symmetric (zero points of 8)",
        rest=_AS_INT4,
        tensors=("qweight", "qzeros", "scales"),
        fields={
            "bits": (4, None),
            "group_size": (GROUP, None),
            "version": ("gemm", "GEMM", None),
        },
    ),
    CheckpointFormat(
        method=GPTQ,
        experts="int4, symmetric, no act-order (`g_idx` in order)",
        rest=_AS_INT4,
        tensors=("qweight", "qzeros", "scales", "g_idx"),
        fields={
            "bits": (4,),
            "group_size": (GROUP, None),
            "checkpoint_format": ("gptq", "gptq_v2", "", None),
            "is_marlin_format": (False, None),
        },
    ),
    CheckpointFormat(
        method=COMPRESSED_TENSORS,
        experts="int4, symmetric, no `g_idx` out of order",
        rest=_AS_INT4,
        tensors=("weight_packed", "weight_scale", "weight_shape"),
        fields={
            "format": ("pack-quantized",),
            "config_groups.*.weights.num_bits": (4,),
            "config_groups.*.weights.type": ("int", None),
            "config_groups.*.weights.group_size": (GROUP,),
            "config_groups.*.input_activations": (None,),
        },
    ),
)


def format_problem(quantization: object) -> str:
    """What is wrong with a quantization_config, or nothing."""
    by_method = {one.method: one for one in FORMATS if one.method}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if not isinstance(method, str) or method not in by_method:
        return f"quant_method is {method!r}, not supported ({' or '.join(map(repr, by_method))})"
    for name, wanted in by_method[method].fields.items():
        for value in _values(quantization, name):
            if value not in wanted:
                readable = " or ".join(repr(one) for one in wanted if one is not None) or "absent"
                return f"{name} is {value!r}, not {readable}"
    return ""


def _values(tree: object, path: str) -> Iterator[object]:
    """All that a dotted name stands for; None where the last part of it is missing."""
    first, _, rest = path.partition(".")
    if not isinstance(tree, dict):
        return
    for key in tree if first == "*" else (first,):
        value = tree.get(key)
        yield from _values(value, rest) if rest else (value,)
