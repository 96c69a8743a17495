"""GPUs of this machine, counted without torch, and who gets which."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence

from ctl.base.host import Host


def count_gpus(environment: Mapping[str, str] | None = None) -> int:
    """Number of GPUs that a process of ours would see; 0 without a driver."""
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    listed = Host().run("nvidia-smi", "-L").splitlines()
    return sum(line.startswith("GPU ") for line in listed)


def assign_devices(num_ranks: Sequence[int], num_gpus: int) -> list[str]:
    """Device of rank 0 of each worker, round robin; rank r of a worker uses the r-th after it.

    Workers may share GPUs, ranks of one worker may not. Raises ValueError when a worker has
    more ranks than there are GPUs.
    """
    devices = []
    following = 0
    for count in num_ranks:
        if count > num_gpus:
            raise ValueError(
                f"a worker of {count} ranks needs {count} GPUs, this machine has {num_gpus}"
            )
        if following + count > num_gpus:
            following = 0
        devices.append(f"cuda:{following}")
        following = (following + count) % num_gpus
    return devices


def ranks_per_gpu(num_ranks: Sequence[int], devices: Sequence[str]) -> list[int]:
    """Of the fullest GPU of each worker of `assign_devices`: ranks that share it."""
    used = [
        [int(device.partition(":")[2]) + rank for rank in range(count)]
        for count, device in zip(num_ranks, devices, strict=True)
    ]
    shared = Counter(gpu for gpus in used for gpu in gpus)
    return [max(shared[gpu] for gpu in gpus) for gpus in used]
