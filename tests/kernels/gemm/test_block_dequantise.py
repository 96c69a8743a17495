import pytest
import torch

from kernels.gemm.block_dequantise import block_dequantise
from tests.kernels.tensors import generator, randn


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (129, 300), (256, 5), (400, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_one_block_at_a_time(
    request: pytest.FixtureRequest, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    rng = generator(request.node.nodeid)
    weight = (100 * randn(rng, *shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=rng) + 0.1
    want = weight.float()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            want[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scale[i, j]
    assert torch.equal(block_dequantise(weight, scale, dtype), want.to(dtype))


def test_scales_of_another_shape_are_refused() -> None:
    weight = torch.zeros(129, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="scale_inv must be"):
        block_dequantise(weight, torch.ones(1, 1), torch.float32)
