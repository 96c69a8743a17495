"""How evenly a placement spreads a load.

A rank's load is the load of the experts in its slots; replicas of an expert share its load
equally. Balancedness of a layer is mean over max of its ranks' loads, 1 without any load.

    slots  [L, R, S] int64, logical experts by layer, rank and slot; EMPTY where there is none
    load   [L, E] float64
"""

import numpy as np
import numpy.typing as npt

from ep.placement.placement import EMPTY, Placement

Slots = npt.NDArray[np.int64]
Load = npt.NDArray[np.float64]


def slots_of(placement: Placement) -> Slots:
    """[L, R, S] of all MoE layers."""
    shape = (placement.num_layers, placement.num_ranks, placement.slots_per_rank)
    return np.array(placement.physical_to_logical, dtype=np.int64).reshape(shape)


def num_replicas(slots: Slots, num_logical: int) -> Slots:
    """[L, E] slots that hold each expert."""
    num_layers, num_ranks, slots_per_rank = slots.shape
    flat = slots.reshape(num_layers, num_ranks * slots_per_rank)
    cell = np.arange(num_layers)[:, None] * num_logical + flat
    counts = np.bincount(cell[flat != EMPTY], minlength=num_layers * num_logical)
    return counts.reshape(num_layers, num_logical)


def rank_loads(slots: Slots, load: Load) -> Load:
    """[L, R]"""
    share = load / np.maximum(num_replicas(slots, load.shape[1]), 1)
    # What EMPTY (the last expert, when taken for an index) reads does not count.
    flat = slots.reshape(slots.shape[0], slots.shape[1] * slots.shape[2])
    shares = np.where(flat == EMPTY, 0.0, np.take_along_axis(share, flat, axis=1))
    loads: Load = shares.reshape(slots.shape).sum(axis=2)
    return loads


def balancedness(slots: Slots, load: Load) -> Load:
    """[L], each in (0, 1]."""
    return balancedness_of(rank_loads(slots, load))


def balancedness_of(loads: Load) -> Load:
    """The same from rank loads [L, R]."""
    peak: Load = loads.max(axis=1)
    mean: Load = loads.mean(axis=1)
    return np.divide(mean, peak, out=np.ones_like(peak), where=peak > 0)
