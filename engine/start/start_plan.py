"""What a rank decides before it takes memory, from facts alone: no device, no group, no weights.

    plan = StartPlan.of(settings, config, form=..., weights=..., memory=..., choose=...)

Ranks call it when they start, `ctl plan` (engine/planning) on any machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core.memory_term import MemoryTerm
from engine.process.draft_count import MOST_REQUESTS
from engine.process.settings import WorkerSettings
from engine.start.memory_plan import MemoryPlan, plan_memory
from engine.start.rank_memory import RankMemory
from engine.step.decode_graphs import graph_sizes
from engine.step.prefill_graphs import prefill_sizes
from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.dispatch.dispatcher_choice import Choice
from ep.dispatch.dispatchers import dispatch_terms
from ep.dispatch.row_caps import bounded
from ep.dispatch.token_caps import decode_cap
from kernels.build.paths import are_references_asked_for
from model.batch import AttentionForm
from model.config import ModelConfig
from model.weight_bytes import planned_weights
from model.weights.weights import Weights

FORMS: Mapping[str, AttentionForm] = {
    "prefill": AttentionForm.PLAIN,
    "decode": AttentionForm.ABSORBED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """`sizes` are rows of recorded decode steps, `pass_sizes` of recorded prefill passes."""

    sizes: tuple[int, ...]
    pass_sizes: tuple[int, ...]
    needs: DispatchNeeds
    choice: Choice
    memory: MemoryPlan

    @classmethod
    def of(
        cls,
        settings: WorkerSettings,
        config: ModelConfig,
        *,
        form: AttentionForm,
        weights: Sequence[MemoryTerm],
        slots_per_rank: int,
        itemsize: int,
        memory: RankMemory,
        choose: Callable[[DispatchNeeds], Choice],
    ) -> "StartPlan":
        """`weights` as `weight_terms` gives them for `slots_per_rank` experts a layer, `itemsize`
        of an activation; `choose` says which dispatcher the group takes. ValueError when it cannot
        have the one that is wanted; `DoesNotFit` when memory is too little."""
        sizes, pass_sizes = recorded_sizes(settings, form), recorded_passes(settings, form)
        needs = dispatch_needs(settings, config, slots_per_rank, form, itemsize)
        choice = choose(needs)
        plan = plan_memory(
            settings,
            config,
            weights=weights,
            dispatch=dispatch_terms(choice.name, needs, settings.group_size),
            graph_sizes=sizes,
            pass_sizes=pass_sizes,
            num_slots=slots_per_rank,
            itemsize=itemsize,
            memory_bytes=memory.num_bytes,
            others_bytes=memory.others_bytes,
        )
        return cls(sizes=sizes, pass_sizes=pass_sizes, needs=needs, choice=choice, memory=plan)


def weight_terms(
    settings: WorkerSettings, config: ModelConfig, weights: Weights, slots_per_rank: int
) -> tuple[MemoryTerm, ...]:
    """What a rank's weights take, from headers alone."""
    return planned_weights(
        weights,
        config,
        num_slots=slots_per_rank,
        fold_shared=settings.shared_expert == "folded",
    )


def recorded_batches(
    settings: WorkerSettings, form: AttentionForm
) -> Mapping[int, tuple[int, ...]]:
    """Requests of decode steps that are recorded, rising, by the number of drafts."""
    if form is not AttentionForm.ABSORBED or not records_graphs(settings):
        return {}
    sizes = graph_sizes(settings.cuda_graph_batch_sizes, settings.graph_batch)
    drafting = tuple(size for size in sizes if size <= MOST_REQUESTS)
    return {0: sizes} | dict.fromkeys(range(1, settings.speculative_tokens + 1), drafting)


def recorded_sizes(settings: WorkerSettings, form: AttentionForm) -> tuple[int, ...]:
    """Rows of these steps, each of them: a token and its drafts of each request."""
    batches = recorded_batches(settings, form)
    return tuple(sorted(size * (1 + count) for count in batches for size in batches[count]))


def recorded_passes(settings: WorkerSettings, form: AttentionForm) -> tuple[int, ...]:
    """Tokens of prefill passes that are recorded; none where ranks wait for each other."""
    is_alone = settings.group_size == 1
    if form is not AttentionForm.PLAIN or not records_graphs(settings):
        return ()
    return prefill_sizes(settings.cuda_graph_prefill_tokens) if is_alone else ()


def records_graphs(settings: WorkerSettings) -> bool:
    """Not on a CPU, and not what references compute."""
    is_possible = settings.device != "cpu" and not are_references_asked_for()
    return settings.cuda_graph and is_possible


def dispatch_needs(
    settings: WorkerSettings,
    config: ModelConfig,
    slots_per_rank: int,
    form: AttentionForm,
    itemsize: int,
) -> DispatchNeeds:
    sizes = recorded_sizes(settings, form)
    decodes = form is AttentionForm.ABSORBED
    # Steps with drafts are of fixed sizes on all ranks, recorded or not; alone on a CPU, no experts
    # compute their padding.
    is_alone = settings.device == "cpu" and settings.group_size == 1
    drafts = decodes and settings.speculative_tokens > 0 and not is_alone
    fixed = sizes[-1] if sizes else settings.running_tokens * drafts
    needs = DispatchNeeds(
        hidden=config.hidden_size,
        itemsize=itemsize,
        slots_per_rank=slots_per_rank,
        num_choices=config.experts_per_token,
        step_tokens=settings.running_tokens if decodes else settings.step_tokens,
        masked_tokens=decode_cap(fixed, settings.group_size) if fixed else 0,
        masked_only=fixed > 0,
    )
    is_on_host = settings.device == "cpu"  # whose dispatchers have no aligned form
    return needs if is_on_host or settings.group_size == 1 else bounded(needs, settings.group_size)
