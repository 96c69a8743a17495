"""The `Experts` gRPC service of a worker's front: an EP group's load, plans and rebalances.

Layers are named as in the model, dense ones counted; further in only MoE layers are.
"""

from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from typing import Any

import grpc

from core.errors import InvalidRequest
from engine.experts.expert_group import ExpertGroup
from engine.experts.rebalance import Rebalance
from engine.experts.rebalance_plan import Experts, RebalancePlan
from engine.experts.rebalance_target import Wish
from ep.eplb.balancedness import balancedness_of, rank_loads, slots_of
from proto import experts_pb2, experts_pb2_grpc
from rpc.admin_token import AdminToken

Context = grpc.aio.ServicerContext[Any, Any]
Progress = experts_pb2.RebalanceProgress


class ExpertsService(experts_pb2_grpc.ExpertsServicer):
    """Every call needs `token`."""

    def __init__(self, group: ExpertGroup, token: AdminToken) -> None:
        self._group = group
        self._token = token

    async def GetLoad(  # noqa: N802 - the names are the contract's
        self, request: experts_pb2.GetLoadRequest, context: Context
    ) -> experts_pb2.ExpertLoad:
        self._token.check(context)
        experts = await self._group.experts()
        wanted = self._indices(request.layers)
        return self._load(experts, wanted or range(experts.placement.num_layers))

    async def Plan(  # noqa: N802
        self, request: experts_pb2.PlanRequest, context: Context
    ) -> experts_pb2.RebalancePlan:
        self._token.check(context)
        return self._plan(await self._group.plan(self._wish(request)))

    async def Apply(  # noqa: N802
        self, request: experts_pb2.ApplyRequest, context: Context
    ) -> AsyncIterator[experts_pb2.RebalanceProgress]:
        self._token.check(context)
        async for progress in _follow(self._group.apply(await self._asked(request))):
            yield progress

    async def RollBack(  # noqa: N802
        self, request: experts_pb2.RollBackRequest, context: Context
    ) -> AsyncIterator[experts_pb2.RebalanceProgress]:
        self._token.check(context)
        async for progress in _follow(await self._group.roll_back()):
            yield progress

    async def _asked(self, request: experts_pb2.ApplyRequest) -> RebalancePlan:
        if request.WhichOneof("what") != "plan":
            return await self._group.plan(self._wish(request.request))
        plan = request.plan
        if plan.group not in ("", self._group.name):
            raise InvalidRequest(f"the plan is for group {plan.group!r}", param="plan")
        changes = {
            self._indices([layer.layer])[0]: tuple(layer.physical_to_logical)
            for layer in plan.layers
        }
        return await self._group.plan_to(plan.placement_version, changes)

    def _wish(self, request: experts_pb2.PlanRequest) -> Wish:
        return Wish(
            max_moves=request.max_moves if request.HasField("max_moves") else None,
            max_bytes=request.max_bytes if request.HasField("max_bytes") else None,
            layers=self._indices(request.layers),
            full=request.full,
        )

    def _indices(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Of MoE layers, by their numbers in the model; each once, in order."""
        known = self._group.layer_numbers
        unknown = sorted(set(numbers) - set(known))
        if unknown:
            has = f"{known[0]} to {known[-1]}" if known else "none"
            raise InvalidRequest(
                f"layer {unknown[0]} has no experts to choose from; MoE layers: {has}",
                param="layers",
            )
        return tuple(index for index, number in enumerate(known) if number in set(numbers))

    def _load(self, experts: Experts, layers: Iterable[int]) -> experts_pb2.ExpertLoad:
        placement, number = experts.placement, self._group.layer_numbers
        loads = rank_loads(slots_of(placement), experts.tokens)
        even = balancedness_of(loads)
        return experts_pb2.ExpertLoad(
            group=self._group.name,
            placement_version=experts.placement_version,
            num_ranks=placement.num_ranks,
            slots_per_rank=placement.slots_per_rank,
            num_logical=placement.num_logical,
            window_seconds=experts.window_seconds,
            num_tokens=round(float(experts.tokens.sum()) / self._group.num_choices),
            layers=[
                experts_pb2.LayerLoad(
                    layer=number[layer],
                    tokens=[round(count) for count in experts.tokens[layer].tolist()],
                    physical_to_logical=placement.physical_to_logical[layer],
                    rank_tokens=loads[layer].tolist(),
                    balancedness=float(even[layer]),
                )
                for layer in layers
            ],
        )

    def _plan(self, plan: RebalancePlan) -> experts_pb2.RebalancePlan:
        numbers = self._group.layer_numbers
        return experts_pb2.RebalancePlan(
            group=self._group.name,
            placement_version=plan.placement_version,
            layers=[
                experts_pb2.LayerPlan(**asdict(layer) | {"layer": numbers[layer.layer]})
                for layer in plan.layers
            ],
            num_moves=plan.num_moves,
            num_bytes=plan.num_bytes,
            seconds=plan.seconds,
            balancedness_before=plan.balancedness_before,
            balancedness_after=plan.balancedness_after,
            traffic=[
                experts_pb2.RankPairBytes(
                    source=source, destination=destination, num_bytes=num_bytes
                )
                for (source, destination), num_bytes in sorted(plan.traffic.items())
            ],
        )


async def _follow(
    rebalance: Rebalance,
) -> AsyncIterator[experts_pb2.RebalanceProgress]:
    """Ends with DONE or raises; it goes on when no one follows any more."""
    async for _ in rebalance.watch():
        if rebalance.error is not None:
            raise rebalance.error
        plan = rebalance.plan
        yield Progress(
            phase=Progress.PHASE_DONE if rebalance.is_over else Progress.PHASE_MOVING,
            num_layers_done=rebalance.num_layers_done,
            num_layers=len(plan.layers),
            num_bytes_done=rebalance.num_bytes_done,
            num_bytes=plan.num_bytes,
            seconds=rebalance.seconds,
            placement_version=rebalance.placement_version,
            balancedness=plan.balancedness_after if rebalance.is_over else 0.0,
        )
