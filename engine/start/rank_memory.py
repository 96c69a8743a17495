"""How much memory a rank may plan with.

    memory = RankMemory.of(settings, device).agreed(group)

Of a GPU its share, and no more than what other processes leave of it; of the host its part.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.process.settings import WorkerSettings
from engine.start.memory_plan import LIBRARY_BYTES
from ep.group.group import EpGroup

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """`num_bytes` may be planned with; other processes hold `others_bytes` of the device."""

    num_bytes: int
    others_bytes: int = 0

    @classmethod
    def of(cls, settings: WorkerSettings, device: torch.device) -> "RankMemory":
        """Of a rank that holds nothing yet but what its libraries took."""
        if device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
            reserved = torch.cuda.memory_reserved(device)
            return cls.of_gpu(settings.gpu_memory_share, total_bytes, free_bytes, reserved)
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(num_bytes=min(host_bytes, _container_limit_bytes(host_bytes)) // settings.ranks)

    @classmethod
    def of_gpu(
        cls, share: float, total_bytes: int, free_bytes: int, reserved_bytes: int
    ) -> "RankMemory":
        """`reserved_bytes` are torch's. What a process's own libraries hold is not told: up to
        what is planned for them is not put down to others."""
        held_bytes = total_bytes - free_bytes - reserved_bytes
        others_bytes = max(0, held_bytes - LIBRARY_BYTES)
        num_bytes = min(int(share * total_bytes), total_bytes - others_bytes)
        return cls(num_bytes=num_bytes, others_bytes=others_bytes)

    def agreed(self, group: EpGroup) -> "RankMemory":
        """That of the rank with least: all ranks come to the same plan."""
        num_bytes, others_bytes = min(group.exchange([self.num_bytes, self.others_bytes]))
        return RankMemory(num_bytes=num_bytes, others_bytes=others_bytes)


def _container_limit_bytes(default: int) -> int:
    try:
        text = CONTAINER_LIMIT.read_text().strip()
    except OSError:
        return default
    return int(text) if text.isdigit() else default  # "max": no limit
