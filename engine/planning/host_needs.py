"""What a node needs beside its GPUs."""

from core.group_plan import HostNeeds
from engine.planning.planner import Planner
from model.w4afp8 import is_routed_weight, weight_of_input_scale
from model.weights.tensor_names import SCALE_SUFFIX, main_tensors

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
    read = read_bytes(planner)
    return HostNeeds(
        cpus=FRONT_CPUS + ranks * RANK_CPUS,
        # Files in shared memory count as memory of the pod.
        memory_bytes=FRONT_BYTES + ranks * RANK_BYTES + shared,
        shared_memory_bytes=shared,
        page_cache_bytes=read,
        read_bytes=read,
    )


def read_bytes(planner: Planner) -> int:
    """Of weights that a node reads: its experts, and once what all ranks have."""
    config, source = planner.config, planner.source
    main = main_tensors(config)
    routed = others = 0
    for name in source.stored:
        weight = weight_of_input_scale(name.removesuffix(SCALE_SUFFIX))
        if weight in main and is_routed_weight(weight):
            routed += source.num_bytes(name)
        elif weight in main:
            others += source.num_bytes(name)
    slots = planner.settings.ranks * planner.slots(planner.settings)
    return others + routed * min(slots, config.num_experts) // max(1, config.num_experts)
