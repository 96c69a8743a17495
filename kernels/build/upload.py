"""From the host to the device without waiting for the device."""

from collections.abc import Sequence

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On a GPU the copy is enqueued after the work of the current stream; on the CPU it is the
    array's own memory. `array` may be written to again afterwards on a GPU only."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_all(arrays: Sequence[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Arrays of one dtype and one dimension each, by one copy."""
    together = upload(np.concatenate(arrays), device)
    parts: tuple[torch.Tensor, ...] = together.split([len(array) for array in arrays])
    return parts
