"""What a node needs beside its GPUs."""

from functools import lru_cache

from core.group_plan import HostNeeds
from engine.planning.planner import Planner
from model.config import ModelConfig
from model.w4afp8 import is_routed_weight
from model.weights.checkpoint import Checkpoint
from model.weights.tensor_names import main_tensors, weight_of

GIB = 1 << 30
FRONT_BYTES = 8 * GIB
# A process with CUDA and torch has 5 GiB; the rest is for weights on their way to the GPU.
RANK_BYTES = 12 * GIB
# What NCCL, NVSHMEM and UCX pass between processes of a node.
RANK_SHARED_BYTES = 2 * GIB
# A rank's step and transfers, and what compiles and reads at its start; the front and its streams.
RANK_CPUS, FRONT_CPUS = 4, 4


def host_needs(planner: Planner) -> HostNeeds:
    ranks = planner.settings.ranks
    shared = ranks * RANK_SHARED_BYTES
    return HostNeeds(
        cpus=FRONT_CPUS + ranks * RANK_CPUS,
        # Files in shared memory count as memory of the pod.
        memory_bytes=FRONT_BYTES + ranks * RANK_BYTES + shared,
        shared_memory_bytes=shared,
        read_bytes=read_bytes(planner),
        checkpoint_bytes=sum(stored_bytes(planner.source, planner.config)),
    )


def read_bytes(planner: Planner) -> int:
    """Of weights that a node reads: its experts, and once what all ranks have."""
    num_experts = max(1, planner.config.num_experts)
    routed, others, _ = stored_bytes(planner.source, planner.config)
    slots = planner.settings.ranks * planner.slots(planner.settings)
    return others + routed * min(slots, num_experts) // num_experts


@lru_cache(maxsize=2)
def stored_bytes(source: Checkpoint, config: ModelConfig) -> tuple[int, int, int]:
    """Of routed experts, of all else that is loaded, and of what is not: MTP layers."""
    main = main_tensors(config)
    routed = others = left = 0
    for name in source.stored:
        weight = weight_of(name)
        if weight not in main:
            left += source.num_bytes(name)
        elif is_routed_weight(weight):
            routed += source.num_bytes(name)
        else:
            others += source.num_bytes(name)
    return routed, others, left
