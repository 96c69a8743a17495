"""What a rank computes with: planned, then loaded, allocated, warmed up and recorded.

built = RankModel.build(settings, config, group, role="decode", ..., clock=clock)
built.runner(...)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kv.kv_memory import make_kv_cache
from engine.process.settings import WorkerSettings
from engine.start.compile_ahead import LibraryBuilds, Passes, compile_kernels
from engine.start.expert_placement import agreed_placement
from engine.start.memory_plan import ACTIVATIONS, GRAPHS, KV, MemoryPlan
from engine.start.model_loading import load_model, open_weights
from engine.start.rank_memory import RankMemory
from engine.start.start_clock import StartClock
from engine.start.start_plan import StartPlan, recorded_batches, weight_terms
from engine.start.warm_up import lengths_up_to, warm_up
from engine.step.decode_graphs import DecodeGraphs
from engine.step.graph_capture import CudaCapture
from engine.step.prefill_graphs import PrefillGraphs, can_record
from engine.step.speculative_steps import SpeculativeSteps
from ep.dispatch.dispatchers import Dispatchers, agree, make_dispatchers
from ep.dispatch.expert_shard import ExpertShard
from ep.group.group import EpGroup
from ep.placement.placement import Placement
from model.batch import AttentionForm
from model.config import ModelConfig
from model.deepseek import DeepseekV3
from model.weight_bytes import held_weights
from model.weights.checkpoint import Checkpoint
from model.weights.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """`kv_cache` is [L, pages, page_tokens, kv_dim]; `memory` are (term, planned, used bytes)."""

    plan: MemoryPlan
    dispatchers: Dispatchers
    model: DeepseekV3
    kv_cache: torch.Tensor
    graphs: DecodeGraphs | None
    speculation: SpeculativeSteps | None
    passes: PrefillGraphs | None
    memory: tuple[tuple[str, int, int], ...]

    @classmethod
    def build(
        cls,
        settings: WorkerSettings,
        config: ModelConfig,
        group: EpGroup,
        *,
        form: AttentionForm,
        device: torch.device,
        dtype: torch.dtype,
        clock: StartClock,
    ) -> "RankModel":
        """On all ranks of the group at once. ValueError for a plan that does not fit."""
        with clock.phase("plan"):
            prepared = Prepared.agree(
                settings, config, group, form=form, device=device, dtype=dtype
            )
        plan, needs = prepared.plan.memory, prepared.plan.needs
        with clock.phase("dispatchers"):
            dispatchers = make_dispatchers(group, prepared.plan.choice, needs, device)
            experts = shard_of(settings, prepared.placement, group.rank, dispatchers, device)
        with clock.phase("load"):
            libraries = LibraryBuilds(settings, group.rank, device)
            model = load_model(
                prepared.source,
                settings,
                config,
                rank=group.rank,
                device=device,
                dtype=dtype,
                experts=experts,
                form=form,
            )
        with clock.phase("compile"):
            libraries.wait()
            compile_kernels(model, form, settings, group, prepared.passes(settings.page_tokens))
        with clock.phase("memory"):
            kv_cache = make_kv_cache(settings, config, plan.kv, device, dtype)
        used = {KV: kv_cache.nbytes} | {each.name: each.num_bytes for each in held_weights(model)}
        with clock.phase("warm_up"):
            used |= warmed(model, kv_cache, form, longest=needs.step_tokens, num_ranks=group.size)
        with clock.phase("graphs"):
            sizes, max_pages = prepared.plan.sizes, prepared.max_pages(settings.page_tokens)
            speculation = speculating(settings, model, kv_cache, form, max_pages)
            graphs = None if speculation else record(model, kv_cache, sizes, max_pages)
            passes = record_passes(model, kv_cache, prepared.plan.pass_sizes)
        experts.counts.zero_()
        for recorded in (graphs, speculation, passes):
            if recorded is not None:
                used[GRAPHS] = recorded.num_bytes
        plan.log_used(group.rank, used)
        return cls(
            plan=plan,
            dispatchers=dispatchers,
            model=model,
            kv_cache=kv_cache,
            graphs=graphs,
            speculation=speculation,
            passes=passes,
            memory=plan.with_used(used),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All that is decided before memory is taken."""

    placement: Placement
    source: Checkpoint
    plan: StartPlan

    def max_pages(self, page_tokens: int) -> int:
        """Of the longest request there can be."""
        return -(-self.plan.memory.kv.max_model_len // page_tokens)

    def passes(self, page_tokens: int) -> Passes:
        """Those that stand for all there will be."""
        plan = self.plan
        return Passes(
            lengths=sorted({*lengths_up_to(plan.needs.step_tokens), *plan.pass_sizes}),
            sizes=sorted({*plan.sizes}),
            max_pages=self.max_pages(page_tokens),
        )

    @classmethod
    def agree(
        cls,
        settings: WorkerSettings,
        config: ModelConfig,
        group: EpGroup,
        *,
        form: AttentionForm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "Prepared":
        """With the other ranks. The plan is logged; ValueError when it does not fit,
        CheckpointError for a folder that is not what its configuration says."""
        placement = agreed_placement(settings, config, group)
        source = open_weights(settings, device)
        source.check(config)
        weights = Weights(checkpoint=source, device=device, dtype=dtype, form=form)
        plan = StartPlan.of(
            settings,
            config,
            form=form,
            weights=weight_terms(settings, config, weights, placement.slots_per_rank),
            slots_per_rank=placement.slots_per_rank,
            itemsize=dtype.itemsize,
            memory=RankMemory.of(settings, device).agreed(group),
            choose=lambda needs: agree(group, settings.ep_dispatcher, needs, device),
        )
        plan.memory.log(group.rank)
        return cls(placement=placement, source=source, plan=plan)


def shard_of(
    settings: WorkerSettings,
    placement: Placement,
    rank: int,
    dispatchers: Dispatchers,
    device: torch.device,
) -> ExpertShard:
    return ExpertShard.build(
        placement,
        rank,
        dispatchers.dispatcher,
        device,
        fold_shared=settings.shared_expert == "folded",
        aligned=dispatchers.aligned,
        masked=dispatchers.masked,
        step_tokens=dispatchers.step_tokens,
        fused=settings.routed_experts == "fused",
    )


def warmed(
    model: DeepseekV3,
    kv_cache: torch.Tensor,
    form: AttentionForm,
    *,
    longest: int,
    num_ranks: int,
) -> dict[str, int]:
    """Warms up; on a GPU, what the longest pass took of its memory beside what was there."""
    device = kv_cache.device
    if device.type != "cuda":
        warm_up(model, kv_cache, form, longest=longest, num_ranks=num_ranks, on_gpu=False)
        return {}
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    warm_up(model, kv_cache, form, longest=longest, num_ranks=num_ranks, on_gpu=True)
    return {ACTIVATIONS: torch.cuda.max_memory_allocated(device) - before}


def record(
    model: DeepseekV3, kv_cache: torch.Tensor, sizes: Sequence[int], max_pages: int
) -> DecodeGraphs | None:
    """On all ranks at once; None where nothing is to be recorded."""
    if not sizes:
        return None
    graphs = DecodeGraphs(
        model.decode,
        kv_cache,
        sizes=sizes,
        max_pages=max_pages,
        vocab_size=model.config.vocab_size,
        capture=CudaCapture(kv_cache.device),
    )
    graphs.capture_all()
    return graphs


def speculating(
    settings: WorkerSettings,
    model: DeepseekV3,
    kv_cache: torch.Tensor,
    form: AttentionForm,
    max_pages: int,
) -> SpeculativeSteps | None:
    """As `record`; None where nothing is drafted."""
    if not settings.speculative_tokens or form is not AttentionForm.ABSORBED:
        return None
    sizes = recorded_batches(settings, form)
    steps = SpeculativeSteps(
        model,
        kv_cache,
        most_drafts=settings.speculative_tokens,
        max_batch=settings.max_running,
        max_rows=settings.running_tokens,
        max_pages=max_pages,
        sizes=sizes,
        capture=CudaCapture(kv_cache.device) if sizes else None,
        synthetic=settings.load_format == "dummy",
    )
    steps.capture_all()
    return steps


def record_passes(
    model: DeepseekV3, kv_cache: torch.Tensor, sizes: Sequence[int]
) -> PrefillGraphs | None:
    """None where nothing is to be recorded, or cannot be."""
    if not sizes or not can_record(model):
        return None
    passes = PrefillGraphs(model, kv_cache, sizes=sizes, capture=CudaCapture(kv_cache.device))
    passes.capture_all()
    return passes
