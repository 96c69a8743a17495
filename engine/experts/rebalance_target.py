"""The placement that a rebalance aims at, within what may travel."""

from dataclasses import dataclass

from engine.experts.rebalance_plan import Experts
from ep.eplb.balance import balance
from ep.eplb.balancedness import slots_of
from ep.eplb.rank_names import keep_ranks
from ep.eplb.within_budget import rebalance
from ep.placement.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked of a rebalance.

    max_moves, max_bytes  what may travel between ranks, over all layers; None: no bound
    layers                MoE layers; none named: all
    full                  the published algorithm, whatever travels
    """

    max_moves: int | None = None
    max_bytes: int | None = None
    layers: tuple[int, ...] = ()
    full: bool = False

    def num_moves(self, expert_bytes: int) -> int | None:
        """The tighter bound, in experts."""
        bounds = [] if self.max_moves is None else [self.max_moves]
        if self.max_bytes is not None:
            bounds.append(self.max_bytes // max(1, expert_bytes))
        return min(bounds, default=None)


def best_target(experts: Experts, wish: Wish, *, num_nodes: int, num_groups: int) -> Placement:
    """For the load of `experts`."""
    now = experts.placement
    chosen = list(wish.layers) or list(range(now.num_layers))
    if not chosen:
        return now
    slots, load = slots_of(now)[chosen], experts.tokens[chosen]
    if wish.full:
        wanted = balance(
            load,
            num_ranks=now.num_ranks,
            slots_per_rank=now.slots_per_rank,
            num_nodes=num_nodes,
            num_groups=num_groups,
        )
        wanted = keep_ranks(slots, wanted, num_nodes)
    else:
        wanted = rebalance(
            slots,
            load,
            max_moves=wish.num_moves(experts.expert_bytes),
            num_nodes=num_nodes,
            num_groups=num_groups,
        )
    placed = wanted.reshape(len(chosen), -1).tolist()
    return now.with_layers(dict(zip(chosen, map(tuple, placed), strict=True)))
