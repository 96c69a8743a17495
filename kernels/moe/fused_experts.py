"""Weights of the routed experts of one rank, as `kernels.moe.fused_moe` takes them."""

from dataclasses import dataclass

import torch

from kernels.build.fp8_scales import GROUP
from kernels.build.operands import FLOATS, check_operand


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedExperts:
    """gate_up [E, 2 I, H], gate half first, and down [E, H, I]: bfloat16, float32, or float8_e4m3fn
    with scales [E, rows / 128, columns / 128] float32, which are None for others. Raises ValueError
    for what does not fit together."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        return bool(self.gate_up.dtype == torch.float8_e4m3fn)

    def __post_init__(self) -> None:
        if self.gate_up.dim() != 3 or not len(self.gate_up):
            raise ValueError(f"gate_up must be [E, 2 I, H], is {tuple(self.gate_up.shape)}")
        num_experts, double_width, hidden = self.gate_up.shape
        if self.down.shape != (num_experts, hidden, double_width // 2):
            raise ValueError(
                f"down {tuple(self.down.shape)} does not fit gate_up {tuple(self.gate_up.shape)}"
            )
        have_scales = {each is not None for each in (self.gate_up_scale, self.down_scale)}
        if have_scales != {self.is_fp8}:
            raise ValueError("FP8 weights have scales, others have none")
        if self.is_fp8 and (hidden % GROUP or double_width % (2 * GROUP)):
            raise ValueError(f"FP8 needs multiples of 128: H {hidden}, I {double_width // 2}")
        device = self.gate_up.device
        check_operand("gate_up", self.gate_up, device, *FLOATS, torch.float8_e4m3fn)
        check_operand("down", self.down, device, self.gate_up.dtype)
        for weight, scale in ((self.gate_up, self.gate_up_scale), (self.down, self.down_scale)):
            if scale is not None:
                _, rows, columns = weight.shape
                shape = (num_experts, rows // GROUP, columns // GROUP)
                check_operand("scales", scale, device, torch.float32, shape=shape)
