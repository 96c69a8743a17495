"""Every operation refuses operands of another dtype, device or shape before anything is launched,
and ids that there are not where it can see them."""

from collections.abc import Iterator

import pytest
import torch

from kernels.build.operands import check_contiguous, check_ids, check_operand, check_shape
from tests.kernels.operand_cases import CASES, EXPERTS

# Of a kind that nothing here takes.
OTHER = {
    torch.float32: torch.float16,
    torch.float64: torch.float16,
    torch.float8_e4m3fn: torch.float8_e5m2,
    torch.int32: torch.int16,
    torch.int64: torch.int16,
    torch.uint8: torch.float32,
    torch.bool: torch.uint8,
    torch.complex64: torch.complex128,
}
# They are bytes.
ANY_DTYPE = [("permute", "hidden"), ("permute_masked", "hidden")]
# No device is another one than that of the only operand.
ALONE = {name for name, case in CASES.items() if len(case.operands) == 1}


def operands() -> Iterator[tuple[str, str]]:
    for name, case in CASES.items():
        for operand in case.operands:
            yield name, operand


def dimensions() -> Iterator[tuple[str, str, int]]:
    for name, operand in operands():
        case = CASES[name]
        for dim in range(case.operands[operand].dim()):
            if (operand, dim) not in case.free:
                yield name, operand, dim


@pytest.mark.parametrize("name", CASES)
def test_what_fits_is_taken(name: str) -> None:
    CASES[name].run()


@pytest.mark.parametrize(
    ("name", "operand"), [each for each in operands() if each not in ANY_DTYPE]
)
def test_another_dtype_is_refused(name: str, operand: str) -> None:
    given = CASES[name].operands[operand]
    other = given.float() if given.dtype == torch.float8_e4m3fn else given
    with pytest.raises(ValueError):
        CASES[name].run(**{operand: other.to(OTHER[given.dtype])})


@pytest.mark.parametrize(("name", "operand"), [each for each in operands() if each[0] not in ALONE])
def test_another_device_is_refused(name: str, operand: str) -> None:
    with pytest.raises(ValueError):
        CASES[name].run(**{operand: CASES[name].operands[operand].to("meta")})


@pytest.mark.parametrize(("name", "operand", "dim"), list(dimensions()))
def test_another_shape_is_refused(name: str, operand: str, dim: int) -> None:
    given = CASES[name].operands[operand]
    with pytest.raises(ValueError):
        CASES[name].run(**{operand: given.narrow(dim, 0, given.shape[dim] - 1).contiguous()})


@pytest.mark.parametrize(
    ("name", "operand", "wrong"),
    [
        ("permute", "topk_idx", EXPERTS),
        ("permute", "topk_idx", -2),
        ("fused_moe", "topk_idx", 9),
        ("fused_moe", "topk_idx", -2),
        ("combine", "row_of", 5),
        ("combination", "row_of", 5),
        ("combine", "row_of", -2),
        ("pack_tokens", "topk_idx", 2**40),
        ("count_experts", "topk_idx", EXPERTS),
        ("choose_replica", "topk_idx", -1),
        ("choose_replica", "num_replicas", 0),
        ("route", "num_replicas", 3),
        ("rope_write", "slots", 12),
        ("rope_write", "slots", -2),
        ("absorb_query", "slots", 12),
        ("grouped_linear_aligned", "expert_of", EXPERTS),
        ("fp8_grouped_gemm_contiguous", "expert_of", EXPERTS),
        ("mla_decode_paged", "block_table", 3),
        ("mla_decode_paged", "block_table", -1),
        ("mla_decode_paged", "kv_lengths", 9),
    ],
)
def test_ids_that_there_are_not_are_refused(name: str, operand: str, wrong: int) -> None:
    given = CASES[name].operands[operand].clone()
    given.view(-1)[0] = wrong
    with pytest.raises(ValueError):
        CASES[name].run(**{operand: given})


@pytest.mark.parametrize("name", ["mla_prefill", "mla_prefill_grouped"])
def test_pages_that_there_are_not_are_refused(name: str) -> None:
    """They are in the rows and groups of the plan."""
    cache = CASES[name].operands["cache"]
    with pytest.raises(ValueError, match="must be of 0"):
        CASES[name].run(cache=cache[:2])


@pytest.mark.parametrize(
    ("name", "operand"),
    [
        ("permute", "hidden"),
        ("rope_write", "cache"),
        ("rope_write", "latent"),
        ("rope_write", "rotation"),
        ("absorb_query", "cache"),
        ("absorb_query", "kv_b"),
        ("absorb_query", "query"),
        ("absorb_values", "kv_b"),
        ("route", "physical"),
        ("fp8_gemm", "weight"),
        ("fp8_grouped_gemm_masked", "x"),
        ("grouped_linear_masked", "x"),
        ("w4a8_masked", "blocks"),
        ("w4a8_masked", "activations"),
        ("mla_decode_paged", "cache"),
        ("mla_prefill_grouped", "cache"),
        ("mla_prefill_grouped", "out"),
        ("quantise", "x"),
        ("rescale", "x"),
        ("silu_mul_quantise", "x"),
        ("rms_norms", "residual"),
    ],
)
def test_gaps_are_refused(name: str, operand: str) -> None:
    given = CASES[name].operands[operand]
    apart = given.unsqueeze(-1).expand(*given.shape, 2).contiguous()[..., 0]
    assert not apart.is_contiguous()
    with pytest.raises(ValueError):
        CASES[name].run(**{operand: apart})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("permute", {"num_experts": 0}),
        ("permute", {"alignment": 0}),
        ("permute", {"most": 1}),
        ("pack_tokens", {"num_rows": 5}),
        ("gate", {"num_groups": 3}),
        ("gate", {"groups_per_token": 3}),
        ("gate", {"experts_per_token": 3}),
        ("route", {"experts_per_token": 0}),
        ("route", {"first": -1}),
        ("absorb_values", {"nope_dim": 134}),
        ("grouped_linear", {"counts": [1, 0, 3, 1]}),
        ("grouped_linear", {"counts": [7, -1, 0, 0]}),
        ("mla_decode_paged", {"value_dim": 13}),
        ("mla_decode_paged", {"value_dim": 0}),
    ],
)
def test_numbers_that_do_not_fit_are_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        CASES[name].run(**options)


def test_what_is_wrong_is_said() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(
        ValueError, match=r"x must be torch.int32 or torch.int64 on cpu, is torch.f"
    ):
        check_operand("x", x, x.device, torch.int32, torch.int64)
    with pytest.raises(ValueError, match=r"x must be \[3, 2\], is \[2, 3\]"):
        check_shape("x", x, 3, 2)
    with pytest.raises(ValueError, match=r"x must be contiguous, has strides \(1, 3\)"):
        check_contiguous(x=x.t())
    with pytest.raises(ValueError, match=r"x must be of -1 .. 3, are of -2 .. 9"):
        check_ids("x", torch.tensor([3, 9, -2]), -1, 4)
    check_ids("x", torch.tensor([9], device="meta"), -1, 4)
    check_ids("x", torch.empty(0, dtype=torch.int64), -1, 4)
