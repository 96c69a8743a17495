"""What decides whether this rank can use DeepEP, looked up on the machine it runs on."""

import hashlib
import importlib
import os
import socket
from pathlib import Path
from typing import Any

import torch

from core.cuda_home import set_cuda_home
from core.log import get_logger
from ep.dispatch.dispatcher_choice import RankFacts

log = get_logger("ep.rank_facts")

_NETWORKS = Path("/sys/class/infiniband")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RDMA_DRIVER = "mlx5_core"  # the only one over which GPUs send by themselves in NVSHMEM


def own_facts(device: torch.device) -> RankFacts:
    on_cuda = device.type == "cuda"
    index = device.index if device.index is not None or not on_cuda else torch.cuda.current_device()
    return RankFacts(
        installed=on_cuda and deep_ep_library() is not None,
        hopper=on_cuda and torch.cuda.get_device_capability(device)[0] >= 9,
        host=_host(),
        device=index if on_cuda else 0,
        peers=_peers(index) if on_cuda else 0,
        rdma=_has_rdma(_NETWORKS),
    )


def deep_ep_library() -> Any:  # noqa: ANN401
    """The module `deep_ep`, None where it is missing or does not fit this machine."""
    set_cuda_home()
    try:
        return importlib.import_module("deep_ep")
    except ModuleNotFoundError as error:
        if error.name == "deep_ep":
            log.info("DeepEP is not installed", advice="pip install 'epserve[gpu]'")
        else:
            log.warning("DeepEP cannot be imported", reason=str(error))
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        log.warning("DeepEP cannot be imported", reason=str(error))
    return None


def _host() -> int:
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    digest = hashlib.sha256(f"{socket.gethostname()} {boot}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def _peers(device: int) -> int:
    bits = 0
    for other in range(torch.cuda.device_count()):
        if other == device or torch.cuda.can_device_access_peer(device, other):
            bits |= 1 << other
    return bits


def _has_rdma(networks: Path) -> bool:
    """Whether one of the adapters has the driver; `networks` is a folder with a link for each."""
    drivers = (adapter / "device" / "driver" for adapter in sorted(networks.glob("*")))
    return any(
        os.path.basename(os.path.realpath(driver)) == _RDMA_DRIVER
        for driver in drivers
        if driver.exists()
    )
