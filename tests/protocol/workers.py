"""A prefill or decode worker in the test's process: the product's front and its rank's loop.

What only passes through is left out: gRPC, zmq, the model's weights, metrics. A front and its rank
tell each other things in order; the explorer says when each of them listens.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import structlog
import torch

from core.clock import ManualClock
from decode_worker.loop import DecodeLoop
from decode_worker.plan import plan
from decode_worker.service import DecodeService
from engine.kv.pages import PagePool
from engine.link.kv_notice import KvNotice
from engine.link.messages import FrontMessage, RankMessage, RankStats, Ready
from engine.process.settings import WorkerSettings
from prefill_worker.loop import PrefillLoop
from prefill_worker.service import PrefillService
from tests.protocol.counting_model import CountingRunner
from tests.protocol.kv_fabric import Fabric, FabricTransfer
from tests.protocol.network import Network
from tests.protocol.process import Process

PAGE_TOKENS = 2
MODEL = "m"
SETTINGS = WorkerSettings.model_construct(
    model=Path("/m"),
    served_model_name=MODEL,
    page_tokens=PAGE_TOKENS,
    chunk_tokens=PAGE_TOKENS,
    max_running=4,
    overlap_schedule=True,
)
# How long a rank sleeps at most that waits for something.
LOOK_SECONDS = 0.5


class Nothing:
    """Whatever is asked of it, it does nothing."""

    def __getattr__(self, _name: str) -> "Nothing":
        return self

    def __call__(self, *_args: object, **_values: object) -> "Nothing":
        return self


class NoExperts:
    """As `RankExperts`."""

    has_news = False
    wait_seconds = float("inf")

    def __init__(self, *_args: object) -> None: ...

    def facts(self) -> tuple[()]:
        return ()

    def has_work(self, _facts: object) -> bool:
        return False


class NoGrammars:
    """As `Grammars`."""

    num_waiting = 0

    def __init__(self, *_args: object) -> None: ...

    def poll(self) -> list[Any]:
        return []

    def drop(self, _name: str) -> None: ...


class _Group:
    """An EP group of one, which never sleeps."""

    uses_torch = steps_use_sockets = False

    def exchange(self, facts: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [facts]

    def idle_wait(self, _socket: object, _seconds: float) -> None: ...

    def peer_woke(self) -> bool:
        return True


class _Link:
    """Both ends of the line between a front and its rank."""

    socket = None

    def __init__(self) -> None:
        self.to_rank: list[FrontMessage] = []
        self.to_front: list[RankMessage] = []
        self.stats = RankStats()

    def drain(self) -> list[FrontMessage]:
        messages, self.to_rank = self.to_rank, []
        return messages

    def send(self, messages: list[RankMessage], stats: RankStats) -> None:
        self.to_front.extend(messages)
        self.stats = stats


class Worker(Process):
    """`link` is what a front and its rank see of each other."""

    def __init__(
        self,
        name: str,
        address: str,
        network: Network,
        clock: ManualClock,
        fabric: Fabric,
        num_pages: int,
    ) -> None:
        super().__init__(name, network, clock)
        self.address = address
        self.clock = clock
        self.epoch = name
        self.link = _Link()
        self.pool = PagePool(num_pages)
        self.kv_cache = torch.zeros(1, num_pages, PAGE_TOKENS, 1, dtype=torch.int32)
        self.transfer = FabricTransfer(fabric, self, self.kv_cache, self._check_written)
        self.front: Any = SimpleNamespace(
            settings=SETTINGS,
            epoch=name,
            draining=False,
            ready=(_ready(num_pages),),
            is_well=True,
            send=lambda _rank, message: self.link.to_rank.append(message),
            on_change=lambda: None,
        )
        self._context: Any = SimpleNamespace(
            start=SimpleNamespace(epoch=name, rank=0, local_rank=0),
            settings=SETTINGS,
            config=SimpleNamespace(num_kv_layers=1, vocab_size=1 << 16, eos_token_ids=(1,)),
            kv_plan=SimpleNamespace(num_pages=num_pages),
            kv_fingerprint="f",
            ready=self.front.ready[0],
            group=_Group(),
            kv_cache=self.kv_cache,
            pool=self.pool,
            transfer=self.transfer,
            runner=CountingRunner(self.kv_cache, self._check_computed),
            link=self.link,
        )

    rank: Any
    has_work: bool  # whether a step of the rank would do anything
    awaits_time: bool  # whether the rank waits for something that makes no sound

    def step_rank(self) -> None:
        self.rank._step()

    def hear_rank(self) -> None:
        """The front takes in what its rank has said."""
        messages, self.link.to_front = self.link.to_front, []
        self.front.stats = (self.link.stats,)
        self.loop.call_soon(lambda: [self.service.on_message(0, each) for each in messages])
        self.loop.run_ready()

    def crash(self) -> None:
        self.is_alive = False
        self.transfer.close()

    def state(self) -> object:
        alive = super().state()
        return alive and (alive, self.front.draining, self.link, self.rank)

    def check(self) -> None:
        """What is true at any time."""

    def check_over(self) -> None:
        """Nothing is under way."""

    def _check_computed(self, pages: Sequence[int]) -> None:
        """A step of the model reads and writes to these."""

    def _check_written(self, notices: Sequence[KvNotice], pages: set[int]) -> None:
        raise AssertionError(f"{notices} for {self.name}")


class DecodeWorker(Worker):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.front.stats = (self.link.stats,)
        self.service = DecodeService(self.front, Nothing(), self.clock)  # type: ignore[arg-type]
        self.rank = DecodeLoop(self._context, self.clock)

    @property
    def has_work(self) -> bool:
        state, rank = self.rank._state, self.rank
        if self.link.to_rank or self.transfer.has_news or rank._inflight is not None:
            return True
        decided = plan(state.snapshot())
        return bool(decided.preempt or decided.grow or decided.admit or decided.step)

    @property
    def awaits_time(self) -> bool:
        return bool(self.rank._state.awaits_kv)

    def check(self) -> None:
        self.pool.check_integrity()

    def check_over(self) -> None:
        assert not self.rank._state.requests, f"{self.name} has a request for ever"
        assert self.service.is_quiet, f"{self.name} is not quiet"
        counts = self.pool.counts()
        assert counts.free == counts.total, f"pages of {self.name} are lost: {counts}"

    def _check_computed(self, pages: Sequence[int]) -> None:
        owned = self.pool._owned.values()
        assert any({*pages} <= {*each} for each in owned), f"a step writes to {pages}, not its own"

    def _check_written(self, notices: Sequence[KvNotice], pages: set[int]) -> None:
        pool, own = self.pool, set[int]()
        for notice in notices:
            attempt_id = notice.attempt_id
            held = pool.pages(attempt_id) or tuple(pool._quarantined.get(attempt_id, ()))
            own.update(held[notice.first_page :][: notice.num_pages])
        assert pages == own, f"pages {pages} are written to for {notices}, who have {own}"


class PrefillWorker(Worker):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.service = PrefillService(self.front, Nothing())  # type: ignore[arg-type]
        self.rank = PrefillLoop(self._context, self.clock)

    @property
    def has_work(self) -> bool:
        return bool(self.link.to_rank or self.transfer.has_news or self.rank._plan())

    @property
    def awaits_time(self) -> bool:
        return bool(self.rank._pusher.num_outstanding)

    def check(self) -> None:
        self.rank._ledger.check_integrity()

    def check_over(self) -> None:
        assert not len(self.rank._state), f"{self.name} has an attempt for ever"
        assert self.service.is_quiet, f"{self.name} is not quiet"
        stats = self.rank._ledger.page_stats()
        assert stats.pages_free == stats.pages_total, f"pages of {self.name} are lost: {stats}"


def _ready(num_pages: int) -> Ready:
    return Ready(
        rank=0,
        device="cpu",
        pid=1,
        kv_fingerprint="f",
        page_tokens=PAGE_TOKENS,
        max_model_len=num_pages * PAGE_TOKENS,
        pages_total=num_pages,
        max_running=SETTINGS.max_running,
        eos_token_ids=(1,),
        vocab_size=1 << 16,
    )


class _Presence:
    """As `Liveness`: the kernel of a frozen process still takes connections."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def is_there(self) -> bool:
        return _network().is_there(self._address)

    def close(self) -> None: ...


def _network() -> Any:
    loop: Any = asyncio.get_running_loop()
    return loop.owner.network


def _refuse(_logger: object, _method: str, event: Any) -> Any:
    raise AssertionError(f"a defect was logged: {event}")


@contextmanager
def stand_ins() -> Iterator[None]:
    """What the product's code is to find in place of threads, sockets and sleep. It has no log;
    what it calls an error fails the test."""
    before = structlog.get_config()
    structlog.configure(
        processors=[_refuse], wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR)
    )
    with ExitStack() as stack:
        stack.callback(lambda: structlog.configure(**before))
        for name, stand_in in (
            ("engine.rank_loop.RankExperts", NoExperts),
            ("engine.rank_loop.time", Nothing()),
            ("transfer.paced.LEAST_ROOM_BYTES", 1),  # a world sets them
            ("transfer.paced.MOST_ROOM_BYTES", 1),
            ("decode_worker.loop.Grammars", NoGrammars),
            ("prefill_worker.first_token.Grammars", NoGrammars),
            ("decode_worker.prefill_peer.channel", lambda address: _network().channel(address)),
            ("decode_worker.prefill_peer.Liveness", _Presence),
        ):
            stack.enter_context(patch(name, stand_in))
        yield
