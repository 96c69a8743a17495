"""What operands of a kernel must be, checked on the host before a launch.

Attributes are compared, a few for each operand: nothing is allocated, and nothing waits for a
device. What lies on one is therefore not read, and kernels touch nothing out of bounds for it.
"""

import torch

FLOATS = (torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


def check_operand(
    name: str,
    x: torch.Tensor,
    device: torch.device,
    *dtypes: torch.dtype,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Raises ValueError unless `x` is of one of `dtypes`, on `device`, and of `shape`, if given."""
    if x.dtype not in dtypes or x.device != device:
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} must be {wanted} on {device}, is {x.dtype} on {x.device}")
    if shape is not None:
        check_shape(name, x, *shape)


def check_shape(name: str, x: torch.Tensor, *shape: int) -> None:
    """Raises ValueError for another shape."""
    if x.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, is {list(x.shape)}")


def check_contiguous(**operands: torch.Tensor) -> None:
    """Raises ValueError unless all are."""
    for name, x in operands.items():
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, has strides {x.stride()}")


def check_ids(name: str, ids: torch.Tensor, first: int, stop: int) -> None:
    """Raises ValueError where `ids` are on a CPU and one is not of first .. stop - 1."""
    if not ids.is_cpu or not ids.numel():
        return
    low, high = (int(each) for each in ids.aminmax())
    if low < first or high >= stop:
        raise ValueError(f"{name} must be of {first} .. {stop - 1}, are of {low} .. {high}")
