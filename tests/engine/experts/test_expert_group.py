"""The front of an EP group: load, plans, rebalances, roll-backs, with ranks the test plays."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from core.clock import ManualClock
from core.errors import (
    EpserveError,
    InternalError,
    InvalidRequest,
    Mismatch,
    Overloaded,
    TransferError,
    Unavailable,
)
from engine.experts import expert_group
from engine.experts.expert_group import ExpertGroup
from engine.experts.expert_metrics import ExpertMetrics
from engine.experts.rebalance import Rebalance
from engine.experts.rebalance_plan import plan_of
from engine.experts.rebalance_target import Wish
from engine.link.messages import (
    ExpertReport,
    ExpertsMoved,
    ExpertsMoving,
    FrontMessage,
    MoveExperts,
    Ready,
    ReportExperts,
)
from engine.process.settings import WorkerSettings
from ep.placement.placement import Placement
from tests.eventually import eventually

EXPERT_BYTES = 100
# Nearly all the load is on experts 2 and 3, which only rank 0 holds.
SKEWED = [[10, 10, 1000, 1000, 10, 10], [10, 10, 10, 10, 10, 10]]


class Ranks:
    """A front and the ranks behind it."""

    def __init__(self, tmp_path: Path, **values: Any) -> None:
        (tmp_path / "config.json").write_text("{}")
        self.settings = WorkerSettings.model_validate(
            {"model": tmp_path, "name": "d", "ranks": 2, **values}
        )
        self.role = "decode"
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ready: tuple[Ready, ...] = tuple(_ready(rank) for rank in range(2))
        self.placement = Placement.trivial(2, 6, 2, num_redundant=2)
        self.version = 0
        self.tokens = np.zeros((2, 6), dtype=np.int64)
        self.order: MoveExperts | None = None
        self.num_reports = 0
        self.answers = True
        self.quiet_seconds = (0.1, 0.2)
        self.registry = CollectorRegistry()
        self.clock = ManualClock()
        self.group = ExpertGroup(self, ExpertMetrics(self.registry), self.clock)  # type: ignore[arg-type]

    def send(self, rank: int, message: FrontMessage) -> None:
        assert rank == 0
        if isinstance(message, MoveExperts):
            assert self.order is None
            self.order = message
        elif isinstance(message, ReportExperts) and self.answers:
            self.num_reports += 1
            report = ExpertReport(
                report_id=message.report_id,
                placement_version=self.version,
                num_ranks=2,
                slots_per_rank=self.placement.slots_per_rank,
                num_logical=6,
                expert_bytes=EXPERT_BYTES,
                physical_to_logical=self.placement.physical_to_logical,
                tokens=self.tokens.tobytes(),
            )
            asyncio.get_running_loop().call_soon(self.group.on_message, report)

    def on_change(self) -> None:
        """Nobody watches."""

    def end(self, outcome: str = "done", reason: str = "") -> None:
        """The ranks are done with what they were told."""
        assert self.order is not None
        if outcome == "done":
            self.placement = self.placement.with_layers(self.order.layers)
        self.version += outcome in ("done", "broken")
        order, self.order = self.order, None
        self.group.on_message(
            ExpertsMoved(
                move_id=order.move_id,
                outcome=outcome,
                reason=reason,
                placement_version=self.version,
                num_bytes=700,
            )
        )

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def _ready(rank: int) -> Ready:
    return Ready(
        rank=rank, device="cpu", pid=1, kv_fingerprint="f", page_tokens=4, max_model_len=64,
        pages_total=8, max_running=4, eos_token_ids=(2,), vocab_size=64, moe_layers=(1, 2),
        experts_per_token=2,
    )  # fmt: skip


@pytest.fixture
async def ranks(tmp_path: Path) -> Ranks:
    ranks = Ranks(tmp_path)
    await ranks.group.experts()  # the window begins here
    ranks.tokens += np.array(SKEWED)
    ranks.clock.advance(20)
    return ranks


async def whole_watch(rebalance: Rebalance) -> list[tuple[int, int]]:
    return [(rebalance.num_layers_done, rebalance.num_bytes_done) async for _ in rebalance.watch()]


async def test_load_of_the_window(ranks: Ranks) -> None:
    experts = await ranks.group.experts()
    assert experts.tokens.tolist() == SKEWED
    assert experts.window_seconds == 20
    ranks.tokens += 5
    ranks.clock.advance(100)
    experts = await ranks.group.experts()
    assert experts.tokens.tolist() == [[5] * 6] * 2
    assert ranks.group.status().balancedness == pytest.approx(ranks.group.balancedness)


async def test_plan_apply_roll_back(ranks: Ranks) -> None:
    group, start = ranks.group, ranks.placement
    plan = await group.plan(Wish())
    assert [layer.layer for layer in plan.layers] == [0]
    assert plan.balancedness_after > plan.balancedness_before + 0.1
    assert plan.num_bytes == plan.num_moves * EXPERT_BYTES
    rebalance = group.apply(plan)
    assert ranks.order is not None
    assert group.status().rebalancing
    watching = asyncio.create_task(whole_watch(rebalance))
    await asyncio.sleep(0)
    moving = ExpertsMoving(
        move_id=rebalance.move_id, num_layers_done=0, num_layers=1, num_bytes=300
    )
    group.on_message(moving)
    await asyncio.sleep(0)
    ranks.end()
    assert await watching == [(0, 0), (0, 300), (1, 700)]
    assert (group.status().placement_version, group.status().rebalancing) == (1, False)
    assert ranks.metric("epserve_expert_rebalances_total", outcome="done") == 1
    assert ranks.metric("epserve_expert_moved_bytes_total") == 700
    assert ranks.metric("epserve_expert_placement_version") == 1
    await group.roll_back()
    ranks.end()
    assert ranks.placement == start
    with pytest.raises(Mismatch, match="no earlier placement"):
        await group.roll_back()


async def test_budget_and_layers(ranks: Ranks) -> None:
    assert (await ranks.group.plan(Wish(max_moves=0))).num_moves == 0
    assert (await ranks.group.plan(Wish(max_bytes=EXPERT_BYTES))).num_moves <= 1
    assert not (await ranks.group.plan(Wish(layers=(1,)))).layers
    with pytest.raises(InvalidRequest, match="no MoE layer 2"):
        await ranks.group.plan(Wish(layers=(2,)))


async def test_refusals(ranks: Ranks) -> None:
    group = ranks.group
    plan = await group.plan(Wish())
    group.apply(plan)
    with pytest.raises(Overloaded, match="being moved already"):
        group.apply(plan)
    ranks.end()
    with pytest.raises(Mismatch, match="planned for placement 0, 1 is in force"):
        group.apply(plan)
    with pytest.raises(Mismatch, match="planned for placement 0"):
        await group.plan_to(0, {})
    with pytest.raises(InvalidRequest, match="lacks expert"):
        await group.plan_to(1, {0: (0,) * 8})


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [("restored", TransferError), ("refused", TransferError), ("broken", InternalError)],
)
async def test_a_failed_move_is_an_error(
    ranks: Ranks, outcome: str, kind: type[EpserveError]
) -> None:
    rebalance = ranks.group.apply(await ranks.group.plan(Wish()))
    ranks.end(outcome, "the cable was cut")
    assert isinstance(rebalance.error, kind)
    assert "the cable was cut" in rebalance.error.message
    assert ranks.metric("epserve_expert_rebalances_total", outcome=outcome) == 1
    # Another one may follow.
    ranks.group.apply(await ranks.group.plan(Wish()))


async def test_a_dead_rank_ends_it(ranks: Ranks) -> None:
    rebalance = ranks.group.apply(await ranks.group.plan(Wish()))
    ranks.died.set_result("rank 1 ended")
    await asyncio.sleep(0)
    assert isinstance(rebalance.error, Unavailable)
    with pytest.raises(Mismatch, match="not whole"):
        await ranks.group.plan(Wish())


async def test_ranks_that_die_unasked_answer_nobody(ranks: Ranks) -> None:
    ranks.answers = False
    asking = asyncio.create_task(ranks.group.experts())
    await asyncio.sleep(0)
    ranks.died.set_result("rank 1 ended")
    with pytest.raises(Unavailable, match="do not answer"):
        await asking


async def test_who_asks_later_is_answered_when_the_first_gave_up(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.answers = False
    monkeypatch.setattr(expert_group, "REPORT_SECONDS", 0.01)
    first = asyncio.create_task(ranks.group.experts())
    await asyncio.sleep(0)
    monkeypatch.setattr(expert_group, "REPORT_SECONDS", 5.0)
    second = asyncio.create_task(ranks.group.experts())
    with pytest.raises(Unavailable, match="do not answer$"):
        await first
    ranks.answers = True
    ranks.send(0, ReportExperts(report_id=3))  # 1 was asked in front
    assert (await second).placement == ranks.placement


async def test_ranks_of_which_nothing_is_heard_are_named(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.answers = False
    ranks.quiet_seconds = (0.4, 12.3)
    monkeypatch.setattr(expert_group, "REPORT_SECONDS", 0.01)
    with pytest.raises(Unavailable, match="do not answer: no step has ended on rank 1 for 12 s$"):
        await ranks.group.plan(Wish())


async def test_only_node_0_speaks(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, nodes=2, node_rank=1, rendezvous="127.0.0.1:1", expert_group="big")
    with pytest.raises(Mismatch, match="node 0 of the group"):
        await ranks.group.experts()
    status = ranks.group.status()
    assert (status.name, status.node_rank, status.num_nodes, status.num_ranks) == ("big", 1, 2, 4)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "d"),
        ({"name": ""}, "decode"),
        ({"nodes": 2, "rendezvous": "leader:29500"}, "leader:29500"),
        ({"nodes": 2, "rendezvous": "leader:29500", "expert_group": "big"}, "big"),
    ],
)
async def test_name(tmp_path: Path, settings: dict[str, Any], name: str) -> None:
    assert Ranks(tmp_path, **settings).group.name == name


@pytest.fixture
async def automatic(tmp_path: Path) -> AsyncIterator[Ranks]:
    ranks = Ranks(tmp_path, rebalance_interval_seconds=0.01)
    ranks.group.begin()
    yield ranks
    await ranks.group.close()


async def until_looked(ranks: Ranks, times: int) -> None:
    wanted = ranks.num_reports + times
    await eventually(lambda: ranks.num_reports >= wanted)


async def test_automatic(automatic: Ranks) -> None:
    await until_looked(automatic, 1)
    automatic.tokens += 7
    automatic.clock.advance(5)
    await until_looked(automatic, 2)
    assert automatic.order is None, "an even load needs nothing"
    automatic.tokens += np.array(SKEWED)
    automatic.clock.advance(5)

    def is_moved() -> bool:
        # Time goes on: a look at the load of before may be what the last advance has led to.
        automatic.clock.advance(0.02)
        return automatic.order is not None

    await eventually(is_moved)
    automatic.end()
    assert automatic.metric("epserve_expert_rebalances_total", outcome="done") == 1


async def test_off_by_default(ranks: Ranks) -> None:
    ranks.group.begin()
    await until_looked(ranks, 1)
    assert ranks.order is None
    await ranks.group.close()


async def during_a_report(ranks: Ranks, use: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
    """What `use`, which asks for a report, comes to when a move ends as the report has come."""
    asked = asyncio.create_task(use)
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(ranks.end)
    return await asked


async def test_a_report_from_before_the_end_of_a_move(ranks: Ranks) -> None:
    """It does not make the placement that it tells of the one in force."""
    ranks.group.apply(await ranks.group.plan(Wish()))
    experts = await during_a_report(ranks, ranks.group.experts())
    assert (experts.placement_version, ranks.group.placement_version) == (0, 1)
    with pytest.raises(Mismatch, match="1 is in force"):
        ranks.group.apply(plan_of(experts, experts.placement, 1e9, only_gains=True))


async def test_two_who_roll_back_at_once(ranks: Ranks) -> None:
    ranks.group.apply(await ranks.group.plan(Wish()))
    ranks.end()
    await ranks.group.roll_back()
    with pytest.raises(Mismatch, match="no earlier placement"):
        await during_a_report(ranks, ranks.group.roll_back())
