"""Operations of a decode step of one rank, and what each must move and compute at least.

    floor = max(bytes of memory / rate of a copy, bytes of rows / rate of a copy,
                FLOPs / rate of the data sheet)

Memory alone has weights and latents: more of them than any cache holds. Rows are what kernels hand
each other, few enough to stay in the second-level cache while memory is read. They count at the
same rate, since no other is measured: what moves nothing else can come a little below its floor, as
can what only reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.deepseek_v3_config import WeightFormat
from bench.kernels_floor import FP8_FLOPS
from kernels.gemm.block_dequantise import BLOCK
from kernels.moe.w4a8_grouped_gemm_packing import BLOCK_ROWS, GROUP, READ_BYTES
from model.config import ModelConfig

BF16, FP8, FLOAT32 = 2, 1, 4  # bytes
BF16_FLOPS = FP8_FLOPS / 2
CHOICE_BYTES = 20  # of the gate: which expert, logical and physical, and its weight
COMBINING_ROWS = 17  # from which on a norm combines what experts give

QUERIES_AND_LATENTS = "queries and latents"
QUERIES = "queries of heads"
FOLDED_QUERIES = "queries by kv_b"
ATTENTION = "attention"
VALUES = "values by kv_b"
OUTPUT = "output projection"
DENSE_UP = "dense layers, gate and up"
DENSE_ACTIVATION = "dense layers, activation"
DENSE_DOWN = "dense layers, down"
SHARED_UP = "shared expert, gate and up"
SHARED_ACTIVATION = "shared expert, activation"
SHARED_DOWN = "shared expert, down"
ROUTER = "logits of experts"
GATE = "choice of experts"
PLACEMENT = "placement of rows"
EXPERTS_UP = "experts, gate and up"
EXPERTS_ACTIVATION = "experts, activation"
EXPERTS_DOWN = "experts, down"
COMBINATION = "combination"
FIRST_NORM = "first norm"
QUERY_NORMS = "norms of queries"
ATTENTION_NORMS = "norms behind attention"
EXPERT_NORMS = "norms behind experts"
DENSE_NORMS = "norms behind dense layers"
LOGITS = "logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`count` times in a step; all else is of each time."""

    name: str
    count: int
    memory_bytes: float = 0.0
    row_bytes: float = 0.0
    flops: float = 0.0
    flops_per_second: float = BF16_FLOPS

    def floor_microseconds(self, bytes_per_second: float) -> float:
        """Of all times together."""
        moved = max(self.memory_bytes, self.row_bytes) / bytes_per_second
        return 1e6 * self.count * max(moved, self.flops / self.flops_per_second)


def decode_operations(
    config: ModelConfig, *, weights: WeightFormat, num_slots: int, batch: int, context: int
) -> tuple[Operation, ...]:
    """Of a rank with `num_slots` experts a layer, which get equally many rows, and of `batch`
    requests behind `context` tokens each."""
    step = _Step(config, weights, num_slots, batch, context)
    found = (*step.attention(), *step.dense(), *step.experts(), *step.norms(), step.logits())
    return tuple(operation for operation in found if operation.count)


@dataclass(frozen=True, slots=True)
class _Step:
    config: ModelConfig
    weights: WeightFormat
    num_slots: int
    batch: int
    context: int

    @property
    def num_dense(self) -> int:
        return self.config.num_layers - self.config.num_moe_layers

    @property
    def num_routed(self) -> int:
        """Rows of all experts here."""
        return self.batch * self.config.experts_per_token

    def attention(self) -> Iterator[Operation]:
        config, count, batch = self.config, self.config.num_layers, self.batch
        heads, latent = config.num_heads, config.kv_lora_rank
        queries = heads * config.qk_head_dim
        first = (config.q_lora_rank or queries) + config.kv_dim
        yield self.product(QUERIES_AND_LATENTS, count, first, config.hidden_size)
        if config.q_lora_rank is not None:
            yield self.product(QUERIES, count, queries, config.q_lora_rank)
        absorbed = heads * config.kv_dim
        yield self.per_head(
            FOLDED_QUERIES, config.qk_nope_head_dim,
            BF16 * batch * (queries + absorbed + 2 * config.kv_dim),
        )  # fmt: skip
        tokens = batch * (self.context + 1)
        yield Operation(
            name=ATTENTION,
            count=count,
            memory_bytes=BF16 * tokens * config.kv_dim,
            row_bytes=BF16 * batch * (absorbed + heads * latent),
            flops=2.0 * heads * tokens * (config.kv_dim + latent),
        )
        values = heads * config.v_head_dim
        rows = batch * (BF16 * heads * latent + FP8 * values)
        yield self.per_head(VALUES, config.v_head_dim, rows)
        yield self.product(OUTPUT, count, config.hidden_size, values)

    def dense(self) -> Iterator[Operation]:
        """MLPs of dense layers, and shared experts."""
        config = self.config
        shared = config.num_shared_experts * config.moe_intermediate_size
        num_shared = config.num_moe_layers if shared else 0
        for up, activation, down, count, width in (
            (DENSE_UP, DENSE_ACTIVATION, DENSE_DOWN, self.num_dense, config.intermediate_size),
            (SHARED_UP, SHARED_ACTIVATION, SHARED_DOWN, num_shared, shared),
        ):
            yield self.product(up, count, 2 * width, config.hidden_size)
            yield self.activation(activation, count, self.batch, width)
            yield self.product(down, count, config.hidden_size, width)

    def experts(self) -> Iterator[Operation]:
        config, count, batch = self.config, self.config.num_moe_layers, self.batch
        hidden, width = config.hidden_size, config.moe_intermediate_size
        logits = FLOAT32 * batch * config.num_experts
        yield Operation(
            name=ROUTER,
            count=count,
            memory_bytes=BF16 * config.num_experts * hidden,
            row_bytes=BF16 * batch * hidden + logits,
            flops=2.0 * batch * config.num_experts * hidden,
        )
        chosen = CHOICE_BYTES * self.num_routed
        yield Operation(name=GATE, count=count, row_bytes=logits + chosen)
        size = BF16 if self.weights == "bf16" else FP8
        moved = size * hidden * (batch + self.num_routed)
        yield Operation(name=PLACEMENT, count=count, row_bytes=moved)
        # The int4 product activates what it computes.
        is_gated = self.weights.startswith("w4afp8")
        inner = size * width if is_gated else BF16 * 2 * width
        yield self.grouped(EXPERTS_UP, 2 * width, hidden, size * hidden + inner)
        if not is_gated:
            yield self.activation(EXPERTS_ACTIVATION, count, self.num_routed, width)
        yield self.grouped(EXPERTS_DOWN, hidden, width, size * width + BF16 * hidden)
        if batch < COMBINING_ROWS:
            combined = BF16 * hidden * (self.num_routed + 2 * batch)
            yield Operation(name=COMBINATION, count=count, row_bytes=combined)

    def norms(self) -> Iterator[Operation]:
        """All but the first add to the residual stream, in BF16, and write what follows in FP8. The
        last one's is BF16, which is left out."""
        config = self.config
        row = self.batch * config.hidden_size
        written = BF16 if self.weights == "bf16" else FP8
        added = row * (3 * BF16 + written)
        yield Operation(name=FIRST_NORM, count=1, row_bytes=row * (BF16 + written))
        if config.q_lora_rank is not None:
            query = self.batch * config.q_lora_rank * (BF16 + written)
            yield Operation(name=QUERY_NORMS, count=config.num_layers, row_bytes=query)
        # The gate takes BF16, all else FP8: with a scale of each row's or with a given one.
        also = {"bf16": 0, "w4afp8-static": 2 * FP8}.get(self.weights, FP8)
        behind = row * (4 * BF16 + also)
        yield Operation(name=ATTENTION_NORMS, count=config.num_moe_layers, row_bytes=behind)
        # In front of each dense MLP, and behind it.
        yield Operation(name=DENSE_NORMS, count=2 * self.num_dense, row_bytes=added)
        if self.batch >= COMBINING_ROWS:
            added += BF16 * config.hidden_size * self.num_routed
        yield Operation(name=EXPERT_NORMS, count=config.num_moe_layers, row_bytes=added)

    def logits(self) -> Operation:
        config = self.config
        size = self.batch * (BF16 * config.hidden_size + FLOAT32 * config.vocab_size)
        return Operation(
            name=LOGITS,
            count=1,
            memory_bytes=BF16 * config.vocab_size * config.hidden_size,
            row_bytes=size,
            flops=2.0 * self.batch * config.vocab_size * config.hidden_size,
        )

    def product(self, name: str, count: int, n: int, k: int) -> Operation:
        """Of all rows with a matrix [n, k] of the main part: FP8, or BF16 where all is."""
        is_fp8 = self.weights != "bf16"
        scales = FLOAT32 * -(-n // BLOCK) * -(-k // BLOCK)
        return Operation(
            name=name,
            count=count,
            memory_bytes=n * k + scales if is_fp8 else BF16 * n * k,
            row_bytes=self.batch * ((FP8 if is_fp8 else BF16) * k + BF16 * n),
            flops=2.0 * self.batch * n * k,
            flops_per_second=FP8_FLOPS if is_fp8 else BF16_FLOPS,
        )

    def per_head(self, name: str, width: int, row_bytes: int) -> Operation:
        """With the half of kv_b, in BF16, that has so many rows a head."""
        num_values = self.config.num_heads * width * self.config.kv_lora_rank
        return Operation(
            name=name,
            count=self.config.num_layers,
            memory_bytes=BF16 * num_values,
            row_bytes=row_bytes,
            flops=2.0 * self.batch * num_values,
        )

    def grouped(self, name: str, n: int, k: int, bytes_of_row: int) -> Operation:
        """Of experts' rows with their matrices [n, k], as many of which are read as get rows."""
        each: float = n * k
        if self.weights == "bf16":
            each *= BF16
        elif self.weights == "fp8":
            each += FLOAT32 * n * k / BLOCK**2
        else:
            each *= READ_BYTES / (BLOCK_ROWS * GROUP)
        return Operation(
            name=name,
            count=self.config.num_moe_layers,
            memory_bytes=min(self.num_slots, self.num_routed) * each,
            row_bytes=self.num_routed * bytes_of_row,
            flops=2.0 * self.num_routed * n * k,
            flops_per_second=BF16_FLOPS if self.weights == "bf16" else FP8_FLOPS,
        )

    def activation(self, name: str, count: int, rows: int, width: int) -> Operation:
        written = BF16 if self.weights == "bf16" else FP8
        return Operation(name=name, count=count, row_bytes=rows * width * (2 * BF16 + written))
