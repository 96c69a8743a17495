"""A placement as the tensors that the gate's choices go through.

The tensors keep their place and shape for as long as the model runs: another placement of the
same shape is written into them between two steps, so that captured CUDA graphs stay valid.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ep.placement.placement import EMPTY, Placement
from kernels.moe.choose_replica import choose_replica


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMaps:
    """One MoE layer: physical [E, R] int64, num_replicas [E] int64."""

    physical: torch.Tensor
    num_replicas: torch.Tensor

    def choose(self, topk_idx: torch.Tensor, first: int) -> torch.Tensor:
        """[T, K] logical to physical experts; `first` as in `kernels.moe.choose_replica`."""
        return choose_replica(topk_idx, self.physical, self.num_replicas, first)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementMaps:
    """physical [L, E, R] int64, num_replicas [L, E] int64; R is `Placement.max_replicas`."""

    physical: torch.Tensor
    num_replicas: torch.Tensor

    @classmethod
    def build(cls, placement: Placement, device: str | torch.device) -> "PlacementMaps":
        physical, num_replicas = arrays(placement, range(placement.num_layers))
        return cls(
            physical=torch.from_numpy(physical).to(device),
            num_replicas=torch.from_numpy(num_replicas).to(device),
        )

    def layer(self, layer: int) -> LayerMaps:
        """Views: they see what `write` writes."""
        return LayerMaps(physical=self.physical[layer], num_replicas=self.num_replicas[layer])

    def write(self, placement: Placement, layers: Iterable[int]) -> None:
        """Puts these layers of a placement of the same shape in force, in order on the current
        stream."""
        for layer in layers:
            physical, num_replicas = arrays(placement, (layer,))
            assert physical.shape[1:] == self.physical.shape[1:], "a placement of another shape"
            self.physical[layer].copy_(torch.from_numpy(physical[0]))
            self.num_replicas[layer].copy_(torch.from_numpy(num_replicas[0]))


def arrays(placement: Placement, layers: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """(physical [L, E, R] int64, num_replicas [L, E] int64) of some layers. Unused columns repeat
    the first replica, so that each of them is a place that holds the expert."""
    slots = np.array([placement.physical_to_logical[layer] for layer in layers], dtype=np.int64)
    slots = slots.reshape(-1, placement.num_physical)
    shape = (len(slots), placement.num_logical, placement.max_replicas)
    physical = np.empty(shape, dtype=np.int64)
    num_replicas = np.empty(shape[:2], dtype=np.int64)
    for row, experts in enumerate(slots):
        order = np.argsort(experts, kind="stable")  # by expert, and by place within
        by_expert = experts[order]
        first = np.searchsorted(by_expert, np.arange(placement.num_logical))
        physical[row] = order[first][:, None]
        used = np.flatnonzero(by_expert != EMPTY)
        expert = by_expert[used]
        physical[row, expert, used - first[expert]] = order[used]
        num_replicas[row] = np.bincount(expert, minlength=placement.num_logical)
    return physical, num_replicas
