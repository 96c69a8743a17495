"""How a rank process comes up and goes down, prefill or decode.

    run_rank(loop)      # all of `python -m {role}_worker.rank`

The front starts it with a `RankStart`; it answers with `Ready`, or with a `Failed` without
request id that says why it could not start, and then runs its role's loop until `Shutdown`.
"""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from core.address import is_loopback, parse_address
from core.log import configure, get_logger
from core.process import die_with_parent
from engine.kv.kv_memory import KvPlan
from engine.kv.pages import PagePool
from engine.link.link import RankLink
from engine.link.messages import Failed, RankStats, Ready
from engine.process.fingerprint import kv_fingerprint
from engine.process.rank_start import RankStart
from engine.process.settings import WorkerSettings
from engine.start.model_loading import model_config, weights_revision
from engine.start.rank_model import RankModel
from engine.start.start_clock import StartClock
from engine.start.start_plan import FORMS
from engine.step.cpu_threads import CpuThreads
from engine.step.runner import Runner
from ep.dispatch.dispatchers import Dispatchers
from ep.group.group import EpGroup
from kernels.build.paths import noted
from model.config import ModelConfig
from model.deepseek import DeepseekV3
from transfer.api import Transfer
from transfer.nixl_agent import NixlTransfer

log = get_logger("engine.rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """All that a role's loop works with; `kv_cache` is [L, pages, page_tokens, kv_dim]."""

    start: RankStart
    settings: WorkerSettings
    config: ModelConfig
    kv_plan: KvPlan
    kv_fingerprint: str
    group: EpGroup
    model: DeepseekV3
    kv_cache: torch.Tensor
    pool: PagePool
    transfer: Transfer
    runner: Runner
    link: RankLink
    start_seconds: tuple[tuple[str, float], ...] = ()
    dispatchers: Dispatchers | None = None
    memory: tuple[tuple[str, int, int], ...] = ()  # (term, planned bytes, used bytes)

    @property
    def ready(self) -> Ready:
        return Ready(
            rank=self.start.local_rank,
            device=str(self.kv_cache.device),
            pid=os.getpid(),
            kv_fingerprint=self.kv_fingerprint,
            page_tokens=self.settings.page_tokens,
            max_model_len=self.kv_plan.max_model_len,
            pages_total=self.kv_plan.num_pages,
            max_running=self.settings.max_running,
            eos_token_ids=self.config.eos_token_ids,
            vocab_size=self.config.vocab_size,
            start_seconds=self.start_seconds,
            memory=self.memory,
            moe_layers=tuple(self.config.moe_layer_numbers),
            num_expert_groups=self.config.num_groups,
            experts_per_token=self.config.experts_per_token,
        )

    def close(self) -> None:
        self.transfer.close()
        if self.dispatchers is not None:
            self.dispatchers.close()
        self.group.close()


def run_rank(loop: Callable[[RankContext], None]) -> None:
    """The whole process. Exits with status 1 when it cannot start; a loop's exception ends it
    with a trace, which the front sees as the death of the rank."""
    start = RankStart.from_environment()
    die_with_parent(start.front_pid)
    _leave_signals_to_the_front()
    link = RankLink(start.endpoint, start.local_rank)
    try:
        context = build_context(start, link)
    except Exception as error:
        log.exception("rank cannot start", rank=start.rank)
        message = f"{type(error).__name__}: {error}"
        failure = Failed(request_id="", code="INTERNAL", message=message)
        link.send([failure], RankStats())
        link.close()
        sys.exit(1)
    _leave_signals_to_the_front()  # LLVM takes them at Triton's first compilation
    log.info("kernels", rank=start.rank, **noted())
    num_pages = context.kv_plan.num_pages
    link.send([context.ready], RankStats(pages_total=num_pages, pages_free=num_pages))
    loop(context)
    context.close()
    link.close()
    # Without tearing the interpreter down: unloading torch takes longer than all of the above.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _leave_signals_to_the_front() -> None:
    """It decides when ranks leave; a terminal's Ctrl-C reaches them as well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _start_transfer(
    start: RankStart, settings: WorkerSettings, kv_cache: torch.Tensor
) -> NixlTransfer:
    """Of a worker that listens on loopback only, it does the same."""
    name = f"{start.role}-{start.epoch}-{start.rank}"
    transfer = NixlTransfer(name, loopback=is_loopback(parse_address(settings.listen).host))
    transfer.register(kv_cache)
    return transfer


def build_context(start: RankStart, link: RankLink) -> RankContext:
    """Joins the EP group, makes what computes, registers the KV pool for transfer."""
    clock = StartClock()
    settings = WorkerSettings.model_validate(start.settings)
    configure(
        role=start.role,
        name=f"{settings.name or start.role}/{start.local_rank}",
        level=settings.log_level,
        fmt=settings.log_format,
    )
    with clock.phase("group"):
        device = _take_device(settings, start)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype_name]
        form = FORMS[start.role]
        config = model_config(settings, form)
        threads = CpuThreads(config, settings.threads or _threads_of(settings))
        group = _join_group(start, settings, device)
    built = RankModel.build(
        settings, config, group, form=form, device=device, dtype=dtype, clock=clock
    )
    with clock.phase("transfer"):
        transfer = _start_transfer(start, settings, built.kv_cache)
    with clock.phase("peers"):
        group.begin_steps()
    on_cpu = device.type == "cpu"
    runner = Runner(
        built.model,
        built.kv_cache,
        form,
        threads if on_cpu else None,
        graphs=built.graphs,
        passes=built.passes,
        speculation=built.speculation,
        in_background=on_cpu and start.role == "decode" and bool(settings.overlap_schedule),
    )
    return RankContext(
        start=start,
        settings=settings,
        config=config,
        kv_plan=built.plan.kv,
        kv_fingerprint=_fingerprint_of(settings, config),
        group=group,
        dispatchers=built.dispatchers,
        model=built.model,
        kv_cache=built.kv_cache,
        memory=built.memory,
        pool=PagePool(built.plan.kv.num_pages),
        transfer=transfer,
        runner=runner,
        link=link,
        start_seconds=clock.seconds(),
    )


def _join_group(start: RankStart, settings: WorkerSettings, device: torch.device) -> EpGroup:
    return EpGroup.create(
        rank=start.rank,
        size=start.size,
        rendezvous=start.rendezvous,
        device=device,
        timeout_seconds=settings.start_seconds,
        silence_seconds=settings.step_timeout_seconds,
        backend=settings.ep_backend,
        secret=start.group_secret.encode(),
    )


def _fingerprint_of(settings: WorkerSettings, config: ModelConfig) -> str:
    return kv_fingerprint(
        settings.model,
        config,
        dtype_name=settings.dtype_name,
        page_tokens=settings.page_tokens,
        revision=weights_revision(settings),
    )


def _take_device(settings: WorkerSettings, start: RankStart) -> torch.device:
    device = torch.device(settings.device_of(start.local_rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _threads_of(settings: WorkerSettings) -> int:
    return max(1, len(os.sched_getaffinity(0)) // settings.ranks)
