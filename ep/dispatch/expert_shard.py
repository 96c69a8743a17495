"""One rank's part in the experts of a model: what it holds and how tokens get to the others."""

from dataclasses import dataclass

import torch

from ep.dispatch.collective import CollectiveDispatcher
from ep.dispatch.dispatcher import AlignedDispatcher, Dispatcher, MaskedDispatcher
from ep.dispatch.local import LocalDispatcher
from ep.group.group import EpGroup
from ep.placement.placement import Placement
from ep.placement.placement_maps import PlacementMaps

ALONE_MAX_TOKENS = 4096  # of a step of fixed size; nothing is reserved for it


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShard:
    """What a model is loaded with, and lives on.

    rank         of the EP group
    placement    what the slots hold when the model is loaded; later the maps say where it is
    dispatcher   of the group; None: `masked` is all there is
    aligned      of the group too; None: `dispatcher` does it all
    masked       of the group too, for steps of fixed sizes; None: there are none
    step_tokens  of a rank that `dispatcher` and `aligned` are given at once; 0: any number
    maps         in force; whoever moves experts rewrites them in place
    counts       [L, E] int64 on the device, (token, choice) pairs of this rank's own tokens by
                 logical expert, only ever growing
    fold_shared  whether each rank computes the shared expert of its own tokens in one go with the
                 routed experts, as one more of them
    fused        whether the routed experts are computed in one call from the gate's choice on, on
                 a rank that has them all: nothing is dispatched
    """

    rank: int
    placement: Placement
    dispatcher: Dispatcher | None
    maps: PlacementMaps
    counts: torch.Tensor
    fold_shared: bool = False
    aligned: AlignedDispatcher | None = None
    masked: MaskedDispatcher | None = None
    step_tokens: int = 0
    fused: bool = False

    @classmethod
    def build(
        cls,
        placement: Placement,
        rank: int,
        dispatcher: Dispatcher | None,
        device: str | torch.device,
        fold_shared: bool = False,
        *,
        aligned: AlignedDispatcher | None = None,
        masked: MaskedDispatcher | None = None,
        step_tokens: int = 0,
        fused: bool = False,
    ) -> "ExpertShard":
        """ValueError when the placement has no such rank, or others when experts are `fused`."""
        if fused and placement.num_ranks > 1:
            raise ValueError(
                f"fused experts are for one rank that has them all, not {placement.num_ranks}"
            )
        if not 0 <= rank < placement.num_ranks:
            raise ValueError(f"rank {rank} is not in 0 .. {placement.num_ranks - 1}")
        shape = (placement.num_layers, placement.num_logical)
        return cls(
            rank=rank,
            placement=placement,
            dispatcher=dispatcher,
            maps=PlacementMaps.build(placement, device),
            counts=torch.zeros(shape, dtype=torch.int64, device=device),
            fold_shared=fold_shared,
            aligned=aligned,
            masked=masked,
            step_tokens=step_tokens,
            fused=fused,
        )

    @classmethod
    def alone(
        cls, num_layers: int, num_logical: int, device: str | torch.device = "cpu"
    ) -> "ExpertShard":
        """All experts on one rank."""
        placement = Placement.trivial(num_layers, num_logical, 1)
        local = LocalDispatcher(num_logical, ALONE_MAX_TOKENS)
        return cls.build(placement, 0, local, device, masked=local)

    def local_experts(self, layer: int) -> tuple[int, ...]:
        """[slots_per_rank] logical experts of MoE layer `layer` (counted without the dense
        ones) in slot order, EMPTY where there is none."""
        return self.placement.local_experts(layer, self.rank)


def make_dispatcher(
    group: EpGroup, slots_per_rank: int, max_tokens: int = 0, *, row_cap: int = 0
) -> LocalDispatcher | CollectiveDispatcher:
    """What serves a group of this size, in all three forms; the masked one for at most
    `max_tokens` a rank, the aligned one for at most `row_cap` rows at once (0: any number), which
    a single rank has no need of."""
    if group.size == 1:
        return LocalDispatcher(slots_per_rank, max_tokens)
    return CollectiveDispatcher(group, slots_per_rank, max_tokens, row_cap=row_cap)
