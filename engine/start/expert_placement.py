"""Where the experts are when a worker starts: in turn, or as a file says."""

from hashlib import blake2b

from core.log import get_logger
from engine.process.settings import WorkerSettings
from ep.group.group import EpGroup
from ep.placement.placement import Placement
from kernels.moe import w4a8_grouped_gemm_packing
from model.config import ModelConfig

log = get_logger("engine.expert_placement")


def agreed_placement(settings: WorkerSettings, config: ModelConfig, group: EpGroup) -> Placement:
    """`starting_placement`, on all ranks of the group at once. ValueError also where ranks would
    start with different ones: each would send tokens to experts that are elsewhere; where they
    hold int4 experts in other layouts, which they exchange byte by byte when these move; and where
    they draft differently, and would wait for each other in other layers."""
    placement = starting_placement(settings, config, group.size)
    layout = w4a8_grouped_gemm_packing.LAYOUT_VERSION
    drafts = f"{settings.speculative_tokens} by {settings.speculative_method}"
    told = f"{placement.as_json()} {layout} {drafts}"
    digest = blake2b(told.encode(), digest_size=8).digest()
    own = int.from_bytes(digest, "little", signed=True)
    for rank, (other,) in enumerate(group.exchange([own])):
        if other != own:
            raise ValueError(
                f"rank {rank} of the group starts with another placement of experts or other "
                f"drafts than rank {group.rank}: the file of expert-placement, or else "
                "num-redundant-experts, speculative-tokens, speculative-method and the version of "
                "epserve must be the same on all nodes"
            )
    if placement.num_empty and group.rank == 0:
        log.info(
            "slots hold no expert",
            slots=placement.num_empty,
            full_with_redundant_experts=placement.num_physical - placement.num_logical,
        )
    return placement


def starting_placement(settings: WorkerSettings, config: ModelConfig, num_ranks: int) -> Placement:
    """ValueError, naming the file, for one that cannot be read or is for another model or another
    number of ranks."""
    if settings.expert_placement is None:
        return Placement.trivial(
            config.num_moe_layers, config.num_experts, num_ranks, settings.num_redundant_experts
        )
    path = settings.expert_placement
    try:
        placement = Placement.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    for what, has, needs in (
        ("MoE layers", placement.num_layers, config.num_moe_layers),
        ("experts a layer", placement.num_logical, config.num_experts),
        ("ranks", placement.num_ranks, num_ranks),
    ):
        if has != needs:
            raise ValueError(f"{path} is for {has} {what}, here are {needs}")
    return placement
