"""The experts of an EP group as its operators see them: load, plans, rebalances, roll-back.

Node 0 of a group speaks for it. What its ranks know (placement in force, tokens counted) is
asked of rank 0 when it is wanted; the front keeps windows of load and earlier placements only.
"""

import asyncio
from typing import Any

import numpy as np

from core.clock import Clock, SystemClock
from core.errors import EpserveError, InvalidRequest, Mismatch, Overloaded, Unavailable
from core.log import get_logger
from engine.experts.expert_metrics import ExpertMetrics
from engine.experts.load_windows import LoadWindows
from engine.experts.rebalance import Rebalance
from engine.experts.rebalance_plan import Experts, RebalancePlan, mean, plan_of
from engine.experts.rebalance_target import Wish, best_target
from engine.link.messages import (
    ExpertAnswer,
    ExpertReport,
    ExpertsMoved,
    ExpertsMoving,
    MoveExperts,
    ReportExperts,
)
from engine.process.front import WorkerFront
from ep.eplb.balancedness import balancedness, slots_of
from ep.placement.placement import Placement
from proto import worker_pb2

log = get_logger("engine.expert_group")

# A report needs one step of the whole group; the router waits 4 s for it.
REPORT_SECONDS = 3.5
# Idle ranks speak once a second.
SILENT_SECONDS = 2.0
MAX_ROLL_BACKS = 16
# The automatic rebalance leaves a placement alone that can hardly be better.
LEAST_GAIN = 0.01


class ExpertGroup:
    """All calls from the event loop's thread. Mismatch where the group cannot be operated from
    here, or is not whole; Unavailable when its ranks do not answer."""

    def __init__(
        self, front: WorkerFront, metrics: ExpertMetrics, clock: Clock | None = None
    ) -> None:
        settings = front.settings
        self.name = settings.expert_group_name or front.role
        self.balancedness = 1.0
        self.placement_version = 0
        self.rebalance: Rebalance | None = None  # under way
        self._front = front
        self._metrics = metrics
        self._clock = clock or SystemClock()
        self._windows = LoadWindows(settings.expert_load_window_seconds)
        self._history: list[Placement] = []
        self._reports: dict[int, asyncio.Future[ExpertReport]] = {}
        self._num_asked = 0
        self._rebalanced_at = self._clock.now()
        self._watch: asyncio.Task[None] | None = None
        front.died.add_done_callback(self._died)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Where in the model its MoE layers are; empty before the ranks are ready."""
        return self._front.ready[0].moe_layers if self._front.ready else ()

    @property
    def num_choices(self) -> int:
        """(token, choice) pairs that a token has, in all MoE layers together."""
        return max(1, self._front.ready[0].experts_per_token * len(self.layer_numbers))

    def begin(self) -> None:
        """Keeps watch over the load from now on."""
        if self._front.settings.node_rank == 0 and self.layer_numbers:
            self._watch = asyncio.create_task(self._keep_watch(), name="expert-load")

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    def on_message(self, message: ExpertAnswer) -> None:
        """From rank 0."""
        match message:
            case ExpertReport():
                waiting = self._reports.pop(message.report_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case ExpertsMoving():
                if self.rebalance is not None and self.rebalance.move_id == message.move_id:
                    self.rebalance.progressed(message)
            case ExpertsMoved():
                self._moved(message)

    def status(self) -> worker_pb2.ExpertGroup:
        """What the router, and whoever asks it, hears of the group. Only node 0 knows how it is."""
        settings = self._front.settings
        return worker_pb2.ExpertGroup(
            name=self.name,
            node_rank=settings.node_rank,
            num_nodes=settings.nodes,
            num_ranks=settings.group_size,
            num_layers=len(self.layer_numbers),
            balancedness=self.balancedness,
            rebalancing=self.rebalance is not None,
            placement_version=self.placement_version,
        )

    async def experts(self) -> Experts:
        """As of now: placement, and load of the window that ends now."""
        self._check()
        self._num_asked += 1
        report_id = self._num_asked  # others ask meanwhile
        answer: asyncio.Future[ExpertReport] = asyncio.get_running_loop().create_future()
        self._reports[report_id] = answer
        self._front.send(0, ReportExperts(report_id=report_id))
        ends: set[asyncio.Future[Any]] = {answer, self._front.died}
        await asyncio.wait(ends, timeout=REPORT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            self._reports.pop(report_id, None)
            raise Unavailable(f"the ranks of the group do not answer{self._silence()}")
        return self._experts_of(answer.result())

    async def plan(self, wish: Wish) -> RebalancePlan:
        """What is best for the load of the last window."""
        experts = await self.experts()
        wrong = set(wish.layers) - set(range(experts.placement.num_layers))
        if wrong:
            raise InvalidRequest(f"there is no MoE layer {min(wrong)}", param="layers")
        return await asyncio.to_thread(self._plan, experts, wish)

    async def plan_to(self, version: int, changes: dict[int, tuple[int, ...]]) -> RebalancePlan:
        """To a given placement: [MoE layer] -> slots. Mismatch when another one than `version` is
        in force, InvalidRequest for one that cannot be."""
        experts = await self.experts()
        if version != experts.placement_version:
            raise Mismatch(
                f"planned for placement {version}, {experts.placement_version} is in force"
            )
        try:
            target = experts.placement.with_layers(changes)
        except ValueError as error:
            raise InvalidRequest(str(error), param="plan") from error
        return await asyncio.to_thread(self._plan_of, experts, target, only_gains=False)

    def apply(self, plan: RebalancePlan) -> Rebalance:
        """Begins it. Overloaded while another one is under way, Mismatch when the plan is for a
        placement that is not in force any more."""
        return self._begin(plan, is_roll_back=False)

    async def roll_back(self) -> Rebalance:
        """Begins to go to the placement before the last one that was put in force; Mismatch when
        there is none."""
        experts = await self.experts()
        if not self._history:  # or another roll-back has just taken the last one
            raise Mismatch("there is no earlier placement")
        earlier = self._history[-1]
        plan = await asyncio.to_thread(self._plan_of, experts, earlier, only_gains=False)
        return self._begin(plan, is_roll_back=True)

    def _begin(self, plan: RebalancePlan, *, is_roll_back: bool) -> Rebalance:
        self._check()
        if self.rebalance is not None:
            raise Overloaded(
                "experts are being moved already",
                retry_after_seconds=max(1.0, self.rebalance.plan.seconds),
            )
        if plan.placement_version != self.placement_version:
            raise Mismatch(
                f"planned for placement {plan.placement_version}, "
                f"{self.placement_version} is in force"
            )
        self._num_asked += 1
        self._rebalanced_at = self._clock.now()
        rebalance = Rebalance(self._num_asked, plan, self._clock, is_roll_back=is_roll_back)
        if not plan.layers:
            rebalance.end(None)
            return rebalance
        log.info(
            "moving experts",
            num_moves=plan.num_moves,
            num_bytes=plan.num_bytes,
            num_layers=len(plan.layers),
            balancedness=round(plan.balancedness_before, 4),
            expected=round(plan.balancedness_after, 4),
        )
        self.rebalance = rebalance
        self._front.send(0, MoveExperts(move_id=rebalance.move_id, layers=plan.changes))
        self._front.on_change()
        return rebalance

    def _moved(self, moved: ExpertsMoved) -> None:
        rebalance = self.rebalance
        if rebalance is None or rebalance.move_id != moved.move_id:
            return
        self.rebalance = None
        if moved.placement_version != self.placement_version:
            if rebalance.is_roll_back and moved.outcome == "done":
                self._history.pop()
            else:
                self._history = [*self._history, rebalance.plan.start][-MAX_ROLL_BACKS:]
        self.placement_version = moved.placement_version
        self._metrics.placement_version.set(moved.placement_version)
        self._metrics.rebalances.labels(moved.outcome).inc()
        self._metrics.moved_bytes.inc(moved.num_bytes)
        rebalance.moved(moved)
        log.info(
            "experts moved",
            outcome=moved.outcome,
            reason=moved.reason,
            num_bytes=moved.num_bytes,
            seconds=round(rebalance.seconds, 3),
        )
        self._front.on_change()

    def _died(self, _died: "asyncio.Future[str]") -> None:
        """The worker is about to leave; its successor starts from where it would start anyway."""
        if self.rebalance is not None:
            self.rebalance.end(Unavailable("the group has lost a rank and starts anew"))
            self.rebalance = None

    def _silence(self) -> str:
        """Which ranks of this node nothing was heard of; another node's are waited for by them."""
        silent = [
            f"rank {rank} for {seconds:.0f} s"
            for rank, seconds in enumerate(self._front.quiet_seconds)
            if seconds > SILENT_SECONDS
        ]
        return f": no step has ended on {', '.join(silent)}" if silent else ""

    def _check(self) -> None:
        settings, front = self._front.settings, self._front
        if settings.node_rank:
            raise Mismatch(f"node 0 of the group speaks for it, this is node {settings.node_rank}")
        if not front.ready or front.died.done():
            raise Mismatch("the group is not whole: a rank of it is missing")

    def _experts_of(self, report: ExpertReport) -> Experts:
        placement = Placement(
            num_ranks=report.num_ranks,
            slots_per_rank=report.slots_per_rank,
            num_logical=report.num_logical,
            physical_to_logical=report.physical_to_logical,
        )
        counted = np.frombuffer(report.tokens, dtype=np.int64).astype(np.float64)
        totals = counted.reshape(placement.num_layers, placement.num_logical)
        seconds, tokens = self._windows.add(self._clock.now(), totals)
        # The end of a move may have been heard of since the report came.
        self.placement_version = max(self.placement_version, report.placement_version)
        by_layer = balancedness(slots_of(placement), tokens)
        self.balancedness = mean(by_layer)
        for number, value in zip(self.layer_numbers, by_layer, strict=True):
            self._metrics.balancedness.labels(number).set(value)
        return Experts(
            placement=placement,
            placement_version=report.placement_version,
            expert_bytes=report.expert_bytes,
            tokens=tokens,
            window_seconds=seconds,
        )

    def _plan(self, experts: Experts, wish: Wish) -> RebalancePlan:
        """In a thread: takes a fraction of a second for large groups."""
        target = best_target(
            experts,
            wish,
            num_nodes=self._front.settings.nodes,
            num_groups=self._front.ready[0].num_expert_groups,
        )
        return self._plan_of(experts, target, only_gains=True)

    def _plan_of(self, experts: Experts, target: Placement, *, only_gains: bool) -> RebalancePlan:
        rate = self._front.settings.rebalance_bytes_per_second
        return plan_of(experts, target, rate, only_gains=only_gains)

    async def _keep_watch(self) -> None:
        interval = self._front.settings.rebalance_interval_seconds
        pause = self._windows.interval_seconds
        if interval:
            pause = min(pause, interval)
        while True:
            try:
                experts = await self.experts()
                if interval and self._clock.now() - self._rebalanced_at >= interval:
                    await self._rebalance_if_needed(experts)
            except EpserveError as error:
                log.warning("experts cannot be looked after", reason=error.message)
            await asyncio.sleep(pause)

    async def _rebalance_if_needed(self, experts: Experts) -> None:
        self._rebalanced_at = self._clock.now()
        threshold = self._front.settings.rebalance_threshold
        if self.rebalance is not None or self.balancedness >= threshold:
            return
        plan = await asyncio.to_thread(self._plan, experts, Wish())
        if plan.balancedness_after - plan.balancedness_before >= LEAST_GAIN:
            self.apply(plan)
