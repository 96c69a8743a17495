"""Launches that overlap with the end of what was launched before (programmatic dependent launch).

A kernel that is launched with `launch_pdl=dependent(...)` begins as soon as all programs of its
predecessor have begun; `follow` waits until all that the predecessor wrote is there. Each program
of such a kernel calls it before it reads or writes what others do, also one that then has nothing
to do: so each kernel ends after all those before it.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def follow(dependent: tl.constexpr):
    """Lets the next kernel begin, waits for the last one."""
    if dependent:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def dependent(tensor: torch.Tensor) -> bool:
    """Whether kernels on its device are launched so: on Hopper and later. Tensors without memory
    are compiled for Hopper."""
    return tensor.is_meta or (tensor.is_cuda and _is_hopper(tensor.device))


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9
