"""One prefill rank inside the test: real model, real loop, pages moved by `MemoryTransfer`.

The EP group is the test's own: whenever the loop would wait, the next line of a script runs;
behind the last one the rank is told to leave. Nothing waits and nothing depends on time.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from core.clock import ManualClock
from core.token_ids import pack_ids, unpack_ids
from engine.kv.kv_memory import KvPlan
from engine.kv.pages import PagePool, pages_of
from engine.link.kv_notice import KvNotice, decode_notices
from engine.link.messages import (
    FrontMessage,
    KvTarget,
    PageRun,
    Prefilled,
    RankMessage,
    RankStats,
    Shutdown,
    SubmitPrefill,
)
from engine.process.settings import WorkerSettings
from engine.sampling.sampler import SampleRow
from engine.sampling.sampling_params import Sampling
from engine.start.rank import RankContext
from engine.step.batch_building import build_batch
from engine.step.runner import Runner
from engine.step.sequence_chunk import SequenceChunk
from model.batch import AttentionForm
from model.config import ModelConfig
from model.deepseek import DeepseekV3
from prefill_worker.loop import PrefillLoop
from tests.packed_sampling import packed
from tests.transfer.memory import MemoryTransfer

PAGE = 8
FINGERPRINT = "same model"
NAMES = (f"agent-{number}" for number in count())


@dataclass
class Model:
    """A tiny checkpoint, loaded once for all tests, with the KV of its MTP layer."""

    folder: Path
    config: ModelConfig
    model: DeepseekV3

    @classmethod
    def load(cls, folder: Path) -> "Model":
        config = replace(ModelConfig.from_folder(folder), mtp="kv")
        model = DeepseekV3.load(folder, device="cpu", dtype=torch.float32, config=config)
        return cls(folder, config, model)

    def new_cache(self, num_pages: int) -> torch.Tensor:
        return torch.zeros(self.config.num_kv_layers, num_pages, PAGE, self.config.kv_dim)

    @torch.inference_mode()
    def reference(self, token_ids: Sequence[int] | bytes) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward pass of nothing but this prompt: KV [L, T, kv_dim] and logits [V]."""
        if isinstance(token_ids, bytes):
            token_ids = unpack_ids(token_ids)
        num_pages = -(-len(token_ids) // PAGE)
        cache = self.new_cache(num_pages)
        sample = SampleRow(sampling=Sampling(), position=len(token_ids))
        pages = range(num_pages)
        batch = build_batch(
            [SequenceChunk(token_ids=token_ids, start=0, pages=pages, sample=sample)],
            page_tokens=PAGE,
            form=AttentionForm.PLAIN,
            tokens_per_rank=(len(token_ids),),
            device=torch.device("cpu"),
        )
        logits = self.model.forward(batch, cache)
        return cache.flatten(1, 2)[:, : len(token_ids)], logits[0]


class TargetRank:
    """The pages of a decode rank, and what it hears of them."""

    def __init__(self, model: Model, num_pages: int = 64) -> None:
        self.name = next(NAMES)
        self.cache = model.new_cache(num_pages)
        self.transfer = MemoryTransfer(self.name)
        self.transfer.register(self.cache)
        self.pool = PagePool(num_pages)
        self.notices: list[KvNotice] = []

    def reserve(self, attempt_id: str, num_tokens: int) -> KvTarget:
        """Pages for an attempt, never in one run, so that order matters."""
        for page in range(-(-num_tokens // PAGE)):
            self.pool.allocate(attempt_id, 1)
            self.pool.allocate("gap", int(page % 3 == 2))
        pages = list(reversed(self.pool.pages(attempt_id)))
        return KvTarget(
            agent=msgspec.msgpack.encode(self.transfer.describe()),
            runs=tuple(PageRun(first=page, count=1) for page in pages),
            kv_fingerprint=FINGERPRINT,
        )

    def hear(self) -> None:
        for notification in self.transfer.notifications():
            self.notices.extend(decode_notices(notification.message))

    def layer_pages(self, attempt_id: str) -> list[tuple[int, int]]:
        """(layer, page index) announced for an attempt, in order of arrival."""
        self.hear()
        return [
            (layer, page)
            for notice in self.notices
            if notice.attempt_id == attempt_id
            for layer in range(notice.first_layer, notice.first_layer + notice.num_layers)
            for page in range(notice.first_page, notice.first_page + notice.num_pages)
        ]

    def kv(self, submit: SubmitPrefill) -> torch.Tensor:
        """[L, T, kv_dim] as decode would read it."""
        pages = self.cache[:, pages_of(submit.target.runs)]
        return pages.flatten(1, 2)[:, : submit.num_tokens]


@dataclass
class ScriptedGroup:
    """An EP group of one. `idle_wait` runs the next line of the script."""

    link: "RecordingLink"
    script: list[Callable[[], None]] = field(default_factory=list)
    uses_torch: bool = False
    steps_use_sockets: bool = False

    def exchange(self, facts: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(facts)]

    def idle_wait(self, socket: object, timeout_seconds: float) -> None:
        if self.script:
            self.script.pop(0)()
        else:
            self.link.inbox.append(Shutdown())

    def wake(self) -> None:
        """Nobody else is there."""

    def peer_woke(self) -> bool:
        return False


@dataclass
class RecordingLink:
    """The rank's end of the link; `on_drain` runs each time before the rank listens."""

    inbox: list[FrontMessage] = field(default_factory=list)
    outbox: list[RankMessage] = field(default_factory=list)
    stats: RankStats = field(default_factory=RankStats)
    on_drain: Callable[[], None] = lambda: None
    socket: object = None

    def drain(self) -> list[FrontMessage]:
        self.on_drain()
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, messages: list[RankMessage], stats: RankStats) -> None:
        self.outbox.extend(messages)
        self.stats = stats


class OneRank:
    """A prefill rank and its loop. `run` returns when the script is over."""

    def __init__(
        self, model: Model, num_pages: int = 64, chunk_tokens: int = 4 * PAGE, max_waiting: int = 64
    ) -> None:
        self.clock = ManualClock()
        self.transfer = MemoryTransfer(next(NAMES))
        cache = model.new_cache(num_pages)
        self.transfer.register(cache)
        self.link = RecordingLink()
        self.group = ScriptedGroup(self.link)
        self.runner = Runner(model.model, cache, AttentionForm.PLAIN)
        stand_in: Any = SimpleNamespace
        context = RankContext(
            start=stand_in(local_rank=0),
            settings=WorkerSettings(
                model=model.folder,
                page_tokens=PAGE,
                chunk_tokens=chunk_tokens,
                max_waiting=max_waiting,
            ),
            config=model.config,
            kv_plan=KvPlan(num_pages=num_pages, page_bytes=1, max_model_len=num_pages * PAGE),
            kv_fingerprint=FINGERPRINT,
            group=self.group,  # type: ignore[arg-type]
            model=model.model,
            kv_cache=cache,
            pool=PagePool(num_pages),
            transfer=self.transfer,
            runner=self.runner,
            link=self.link,  # type: ignore[arg-type]
        )
        self.loop = PrefillLoop(context, self.clock)

    def run(self, *script: Callable[[], None] | FrontMessage) -> list[RankMessage]:
        """Runs the loop; a message in the script is put into the inbox when its turn comes.
        All messages that the front got meanwhile."""
        self.group.script = [self._line(line) for line in script]
        self.link.outbox = []
        self.loop._stop = False
        self.loop.run()
        return self.link.outbox

    def _line(self, line: Callable[[], None] | FrontMessage) -> Callable[[], None]:
        if isinstance(line, msgspec.Struct):
            return lambda: self.link.inbox.append(line)
        return line

    def tell(self, *messages: FrontMessage) -> Callable[[], None]:
        """A script line that says several things at once."""
        return lambda: self.link.inbox.extend(messages)

    def check_nothing_held(self) -> None:
        """Every page is free or merely known."""
        self.loop._ledger.check_integrity()
        assert not len(self.loop._state)
        assert not self.loop._targets
        assert not self.loop._pusher.num_outstanding
        stats = self.link.stats
        assert (stats.pages_owned, stats.pages_free) == (0, stats.pages_total)
        assert (stats.num_running, stats.num_waiting) == (0, 0)


def submit_to(
    target: TargetRank, attempt_id: str, token_ids: Sequence[int], sampling: Sampling | None = None
) -> SubmitPrefill:
    """A request whose pages are reserved at `target`."""
    return SubmitPrefill(
        request_id=f"request of {attempt_id}",
        attempt_id=attempt_id,
        token_ids=pack_ids(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=packed(sampling or Sampling()),
        target=target.reserve(attempt_id, len(token_ids)),
    )


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(4, 260), k=num_tokens)


def check_arrived(model: Model, target: TargetRank, submit: SubmitPrefill) -> None:
    """Every page of every layer announced once, and its contents right."""
    num_pages = -(-submit.num_tokens // PAGE)
    expected = sorted(product(range(model.config.num_kv_layers), range(num_pages)))
    assert sorted(target.layer_pages(submit.attempt_id)) == expected
    check_kv(target.kv(submit), model.reference(submit.token_ids)[0])


def check_kv(got: torch.Tensor, kv: torch.Tensor) -> None:
    """[L, T, kv_dim] each. The MTP layer's at the end of a page is of the token that came next when
    it was computed."""
    torch.testing.assert_close(got[:-1], kv[:-1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        *(_without_page_ends(each[-1]) for each in (got, kv)), rtol=1e-4, atol=1e-5
    )


def _without_page_ends(latents: torch.Tensor) -> torch.Tensor:
    return latents[torch.arange(len(latents)) % PAGE != PAGE - 1]


def prefilled(messages: list[RankMessage], attempt_id: str) -> Prefilled:
    (message,) = [m for m in messages if getattr(m, "attempt_id", "") == attempt_id]
    assert isinstance(message, Prefilled), message
    return message
