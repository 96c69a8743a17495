"""What a rank's memory is for, worked out before any of it is allocated.

    plan = plan_memory(settings, config, weights=..., dispatch=..., role="decode", ...)
    plan.log(rank)                       # one line a term
    ... load, allocate ...
    plan.log_used(rank, used)            # next to what it came to

Weights, KV pages, buffers of dispatchers and of CUDA graphs are exact. What passes need beside
them is an estimate, on the safe side, of the widest layer's intermediate results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.log import get_logger
from core.memory_term import MemoryTerm
from engine.kv.kv_memory import KvPlan, plan_kv
from engine.process.settings import WorkerSettings
from model.config import ModelConfig

log = get_logger("engine.memory_plan")

GIB = 1 << 30
KV = "KV pages"
GRAPHS = "CUDA graphs"
ACTIVATIONS = "activations"
LIBRARIES = "device context and libraries"
# Of CUDA itself, cuBLAS, NCCL and compiled kernels, as nvidia-smi shows it for an idle rank.
LIBRARY_BYTES = 2 * GIB
# A recorded step keeps its kernels and their arguments: some ten kilobytes each, 35 a layer.
GRAPH_BYTES_A_LAYER = 400 << 10
# Keys and values of a cached prefix are expanded so many tokens at a time.
EXPANDED_TOKENS = 4096
NUM_NAMED = 3
ADVICE = {
    "weights": "more ranks (--ranks, --nodes), a w4afp8 checkpoint (ctl quantize), fewer "
    "--num-redundant-experts",
    "dispatch": "a smaller --chunk-tokens or --max-running",
    KV: "fewer --kv-pages, a smaller --max-model-len",
    GRAPHS: "a smaller --cuda-graph-max-batch, fewer --cuda-graph-batch-sizes",
    ACTIVATIONS: "a smaller --chunk-tokens or --max-running",
    LIBRARIES: "a larger device",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """`terms` with the KV pages last; `memory_bytes` is what the rank may count on, where other
    processes hold `others_bytes` of the device."""

    terms: tuple[MemoryTerm, ...]
    memory_bytes: int
    kv: KvPlan
    others_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)

    def log(self, rank: int) -> None:
        """One line a term, and their sum."""
        total = MemoryTerm(name="total", num_bytes=self.total_bytes)
        for term in (*self.terms, total):
            if term.num_bytes or term is total:
                log.info(
                    "memory planned",
                    rank=rank,
                    term=term.name,
                    gib=_gib(term.num_bytes),
                    share=f"{term.num_bytes / self.memory_bytes:.1%}",
                )
        log.info(
            "memory of the device",
            rank=rank,
            gib=_gib(self.memory_bytes),
            others_gib=_gib(self.others_bytes),
            kv_pages=self.kv.num_pages,
            max_model_len=self.kv.max_model_len,
        )

    def with_used(self, used: Mapping[str, int]) -> tuple[tuple[str, int, int], ...]:
        """(term, planned, used bytes), of the terms whose use is known."""
        return tuple(
            (term.name, term.num_bytes, used[term.name])
            for term in self.terms
            if term.name in used and (term.num_bytes or used[term.name])
        )

    def log_used(self, rank: int, used: Mapping[str, int]) -> None:
        for name, planned, taken in self.with_used(used):
            log.info(
                "memory used", rank=rank, term=name, gib=_gib(taken), planned_gib=_gib(planned)
            )


class DoesNotFit(ValueError):
    """The plan needs more than there is; `terms` are all but what has no room at all."""

    def __init__(
        self, terms: Sequence[MemoryTerm], memory_bytes: int, others_bytes: int, reason: str = ""
    ) -> None:
        super().__init__(_refusal(terms, memory_bytes, others_bytes, reason))
        self.terms = tuple(terms)
        self.memory_bytes = memory_bytes


def plan_memory(
    settings: WorkerSettings,
    config: ModelConfig,
    *,
    weights: Sequence[MemoryTerm],
    dispatch: Sequence[MemoryTerm],
    graph_sizes: Sequence[int],
    pass_sizes: Sequence[int] = (),
    num_slots: int,
    itemsize: int,
    memory_bytes: int,
    others_bytes: int = 0,
) -> MemoryPlan:
    """`DoesNotFit`, with the largest terms and what to change, when it does not fit, or when what
    is left cannot hold one request.

    graph_sizes  rows of recorded decode steps; none where nothing is recorded
    pass_sizes   tokens of recorded prefill passes, likewise
    num_slots    experts of a layer on this rank
    itemsize     of an activation
    memory_bytes, others_bytes  what the rank may count on, and what others hold of the device
    """
    terms = [*weights, *dispatch]
    if graph_sizes:
        graphs = graph_bytes(settings, config, graph_sizes, itemsize)
        terms.append(MemoryTerm(name=GRAPHS, num_bytes=graphs))
    elif pass_sizes:
        passes = pass_bytes(config, pass_sizes, itemsize)
        terms.append(MemoryTerm(name=GRAPHS, num_bytes=passes))
    masked_rows = num_slots * settings.group_size * max(graph_sizes, default=0)
    scratch = activation_bytes(settings, config, itemsize=itemsize, masked_rows=masked_rows)
    terms.append(MemoryTerm(name=ACTIVATIONS, num_bytes=scratch))
    if settings.device != "cpu":
        terms.append(MemoryTerm(name=LIBRARIES, num_bytes=LIBRARY_BYTES))
    left = memory_bytes - sum(term.num_bytes for term in terms)
    if left <= 0:
        raise DoesNotFit(terms, memory_bytes, others_bytes)
    try:
        kv = plan_kv(settings, config, itemsize=itemsize, memory_bytes=left)
    except ValueError as error:
        raise DoesNotFit(terms, memory_bytes, others_bytes, str(error)) from error
    terms.append(MemoryTerm(name=KV, num_bytes=kv.num_pages * kv.page_bytes))
    plan = MemoryPlan(
        terms=tuple(terms), memory_bytes=memory_bytes, kv=kv, others_bytes=others_bytes
    )
    if plan.total_bytes > memory_bytes:
        raise DoesNotFit(terms, memory_bytes, others_bytes)
    return plan


def graph_bytes(
    settings: WorkerSettings, config: ModelConfig, sizes: Sequence[int], itemsize: int
) -> int:
    """What recorded decode steps hold: their inputs and logits, with drafts states besides, and
    what each keeps of its kernels; intermediate results are those of the largest, and among the
    activations."""
    drafts = settings.speculative_tokens
    largest = settings.running_tokens if drafts else max(sizes)
    states = largest * config.hidden_size * itemsize if drafts else 0
    longest = min(settings.max_model_len or config.max_position, config.max_position)
    inputs = largest * (3 * 8 + 4 + 4 * -(-longest // settings.page_tokens))
    logits = 4 * largest * config.vocab_size
    kernels = len(sizes) * (config.num_layers + drafts) * GRAPH_BYTES_A_LAYER
    return inputs + logits + states + kernels


def pass_bytes(config: ModelConfig, sizes: Sequence[int], itemsize: int) -> int:
    """What recorded prefill passes hold: their inputs, what attention gives, intermediate results
    of the longest, and what each keeps of its kernels."""
    largest = max(sizes)
    inputs = largest * (3 * 8 + config.num_heads * config.v_head_dim * itemsize)
    scratch = largest * max(elements_a_token(config)) * itemsize
    return inputs + scratch + len(sizes) * config.num_layers * GRAPH_BYTES_A_LAYER


def elements_a_token(config: ModelConfig) -> tuple[int, int, int]:
    """Intermediate results of attention, a dense MLP and a mixture of experts."""
    hidden, heads = config.hidden_size, config.num_heads
    width = config.moe_intermediate_size
    query = heads * config.qk_head_dim
    attention = 4 * hidden + config.kv_dim + 2 * query + 2 * heads * config.v_head_dim
    dense = 2 * hidden + 3 * max(
        config.intermediate_size if config.num_dense_layers else 0,
        width * max(config.num_shared_experts, 1),
    )
    choices = config.experts_per_token
    moe = 3 * hidden + choices * (3 * width + 2 * hidden)
    return attention, dense, moe


def activation_bytes(
    settings: WorkerSettings, config: ModelConfig, *, itemsize: int, masked_rows: int
) -> int:
    """Intermediate results of the widest layer and the logits, for the longest step of a rank.
    `masked_rows` are those of all experts of this rank in a step of fixed size."""
    attention, dense, moe = elements_a_token(config)
    heads, width = config.num_heads, config.moe_intermediate_size
    tokens = max(settings.step_tokens, settings.running_tokens)
    expanded = EXPANDED_TOKENS * heads * (config.qk_head_dim + config.v_head_dim)
    # gate_up and what becomes of it.
    masked = masked_rows * 3 * width
    layer = max(tokens * attention + expanded, tokens * dense, tokens * moe, masked)
    logits = min(tokens, settings.running_tokens) * config.vocab_size * (itemsize + 4)
    return layer * itemsize + logits


def _refusal(terms: Sequence[MemoryTerm], memory_bytes: int, others_bytes: int, reason: str) -> str:
    largest = sorted(terms, key=lambda term: -term.num_bytes)[:NUM_NAMED]
    named = ", ".join(f"{term.name} {_gib(term.num_bytes)} GiB" for term in largest)
    advice = dict.fromkeys(ADVICE[term.name.partition(":")[0]] for term in largest)
    total = _gib(sum(term.num_bytes for term in terms))
    text = f"needs {total} GiB of the {_gib(memory_bytes)} GiB of memory that a rank has; "
    if others_bytes:
        text += f"other processes hold {_gib(others_bytes)} GiB of its device; "
    text += f"the largest: {named}. What helps: {'; '.join(advice)}"
    return f"{reason}; the rest {text}" if reason else f"the plan {text}"


def _gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 3)
