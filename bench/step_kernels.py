"""What each kernel of a step is for, and which operations of a decode step it computes.

Which kernel a dense product takes is chosen by its shape and rows (`kernels/tuned`, DeepGEMM's own
rules), and their names do not say it: what is here holds for an H200 and the batches that are
broken down. Operations whose counts are not those of the kernel are not believed.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from bench import step_operations as ops
from bench.step_operations import Operation

EXPERT_PRODUCTS = "expert products"
DENSE_PRODUCTS = "dense products"
ATTENTION_KERNELS = "attention"
ACTIVATION = "quantise and activate"
NORMS = "norms and rotation"
GATE = "gate"
PERMUTATION = "permute and combine"
OTHER = "everything else"

Names = tuple[str, ...]
_ALL_NORMS = (
    ops.FIRST_NORM, ops.QUERY_NORMS, ops.ATTENTION_NORMS, ops.DENSE_NORMS, ops.EXPERT_NORMS
)  # fmt: skip
_ACTIVATIONS = (ops.DENSE_ACTIVATION, ops.SHARED_ACTIVATION)


class Match(NamedTuple):
    """`choices`: of operations of a decode step, those that are computed are all of one."""

    pattern: str
    purpose: str
    choices: tuple[Names, ...] = ()


# The first that matches a kernel's name counts. DeepGEMM's names have the block's rows and columns
# behind the number of groups.
KERNELS: tuple[Match, ...] = (
    Match(r"w4a8::Form<\d+, \d+, true", EXPERT_PRODUCTS, ((ops.EXPERTS_UP,),)),
    Match(
        r"w4a8::Form<\d+, \d+, false", EXPERT_PRODUCTS,
        ((ops.EXPERTS_DOWN,), (ops.EXPERTS_UP, ops.EXPERTS_DOWN)),
    ),
    Match(r"0u, 4096u, 7168u, .*GemmType\)2", EXPERT_PRODUCTS, ((ops.EXPERTS_UP,),)),
    Match(
        r"^_fp8_grouped_gemm$", EXPERT_PRODUCTS,
        ((ops.EXPERTS_DOWN,), (ops.EXPERTS_UP, ops.EXPERTS_DOWN)),
    ),
    Match(r"grouped|fused_moe|GemmType\)[1-9]|_aligned_gemm|masked_gemm", EXPERT_PRODUCTS),
    Match(
        r"quantise|silu|rescale", ACTIVATION,
        (_ACTIVATIONS, (*_ACTIVATIONS, ops.EXPERTS_ACTIVATION)),
    ),
    Match(r"attend<2>", ATTENTION_KERNELS, ((ops.ATTENTION,),)),
    Match(r"mla|flash|splitkv|attend|^_join$", ATTENTION_KERNELS),
    Match(r"rms_norm", NORMS, (_ALL_NORMS,)),
    Match(r"rope", NORMS),
    Match(r"router", GATE, ((ops.ROUTER,),)),
    Match(r"_gate$", GATE, ((ops.GATE,),)),
    Match(r"_gate|count_experts|_rank$", GATE),
    Match(r"_copy$", PERMUTATION, ((ops.PLACEMENT,),)),
    Match(r"_combine$", PERMUTATION, ((ops.COMBINATION,),)),
    Match(r"permute|_place$|_align$|_copy$|combine", PERMUTATION),
    # 128 rows.
    Match(r"fp8_gemm<128, 128, true>", DENSE_PRODUCTS, ((ops.OUTPUT,),)),
    Match(r"^_fp8_gemm$", DENSE_PRODUCTS, ((ops.QUERIES,),)),
    Match(r" 1u, 64u, 112u, ", DENSE_PRODUCTS, ((ops.SHARED_DOWN, ops.DENSE_DOWN),)),
    Match(r" 1u, 64u, 64u, ", DENSE_PRODUCTS, ((ops.SHARED_UP,),)),
    Match(r" 1u, 64u, 32u, ", DENSE_PRODUCTS, ((ops.QUERIES_AND_LATENTS,),)),
    Match(r" 1u, 128u, 144u, ", DENSE_PRODUCTS, ((ops.DENSE_UP,),)),
    # One row.
    Match(
        r"fp8_gemm<8, 128, false>", DENSE_PRODUCTS,
        ((ops.OUTPUT, ops.SHARED_UP, ops.DENSE_DOWN),),
    ),
    Match(
        r"fp8_gemm<8, 64, false>", DENSE_PRODUCTS,
        ((ops.QUERIES_AND_LATENTS, ops.QUERIES, ops.SHARED_DOWN),),
    ),
    Match(r" 1u, 16u, 144u, ", DENSE_PRODUCTS, ((ops.DENSE_UP,),)),
    # Any number of them.
    Match(r"absorb_query", DENSE_PRODUCTS, ((ops.FOLDED_QUERIES,),)),
    Match(r"absorb_(splits|pieces|values)", DENSE_PRODUCTS, ((ops.VALUES,),)),
    Match(r"nvjet", DENSE_PRODUCTS, ((ops.LOGITS,),)),
    Match(r"gemm|cutlass|cublas|splitk|_splits|bmm|dot_kernel|absorb", DENSE_PRODUCTS),
)  # fmt: skip
PURPOSE_OF_OPERATION: dict[str, str] = {
    name: match.purpose for match in KERNELS for choice in match.choices for name in choice
}


def purpose_of(kernel: str) -> str:
    match = _match_of(kernel)
    return OTHER if match is None else match.purpose


def operations_of(kernel: str, count: int, operations: Sequence[Operation]) -> Names:
    """Of a step's `operations` those that `count` launches of `kernel` compute; none where nobody
    knows."""
    match = _match_of(kernel)
    count_of = {operation.name: operation.count for operation in operations}
    for choice in match.choices if match else ():
        if sum(count_of.get(name, 0) for name in choice) == count:
            return tuple(name for name in choice if name in count_of)
    return ()


def _match_of(kernel: str) -> Match | None:
    found = (each for each in KERNELS if re.search(each.pattern, kernel, re.IGNORECASE))
    return next(found, None)
