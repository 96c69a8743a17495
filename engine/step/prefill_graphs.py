"""Short prefill passes of fixed lengths, recorded layer by layer: what the host would launch in
more time than the device computes it.

    graphs = PrefillGraphs(model, kv_cache, sizes=(64, 128, 256, 512), capture=CudaCapture(device))
    graphs.capture_all()
    if graphs.fits(batch):
        hidden = graphs.hidden_rows(batch, on_layer)     # as DeepseekV3.hidden_rows

Everything of a layer is recorded but attention itself, whose launches depend on the lengths of
rows and prefixes: each recording goes from after the attention of one layer to before that of
the next. The last layer is computed as ever, of the rows that are wanted; or of all, for the KV of
an MTP layer. A pass is padded to the next size with tokens that are neither written, nor attended,
nor sent to an expert.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.step.graph_capture import Capture, Step, capture_sizes
from kernels.elementwise.combine import Update, combined
from model.attention.plan import AttentionPlan
from model.batch import AttentionForm, ForwardBatch
from model.deepseek import DeepseekV3
from model.moe.moe import Moe

SIZES = (64, 128, 256, 384, 512, 768, 1024)
TOKEN_IDS, POSITIONS, SLOTS = range(3)


class PrefillGraphs:
    """For a rank that is alone, or else `can_record` says no. `sizes` rising; `kv_cache`
    [L, pages, page_tokens, kv_dim]."""

    def __init__(
        self,
        model: DeepseekV3,
        kv_cache: torch.Tensor,
        *,
        sizes: Sequence[int],
        capture: Capture,
    ) -> None:
        assert list(sizes) == sorted(set(sizes)), sizes
        assert can_record(model), "not for this model"
        self._sizes = tuple(sizes)
        self._model = model
        self._kv_cache = kv_cache
        self._capture = capture
        config, options = model.config, {"device": kv_cache.device}
        self._inputs = torch.zeros(3, sizes[-1], dtype=torch.int64, **options)
        width = config.num_heads * config.v_head_dim
        # What attention gives; finite, also after a shorter pass.
        self._values = torch.zeros(sizes[-1], width, dtype=kv_cache.dtype, **options)
        self._passes: dict[int, RecordedPass] = {}

    @property
    def num_bytes(self) -> int:
        """Of the device, once all is recorded."""
        return self._inputs.nbytes + self._values.nbytes + self._capture.num_bytes()

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Records all sizes."""
        capture_sizes("prefill pass", self._sizes, self._record, self._capture)

    def _record(self, size: int) -> None:
        self._fill(None, size)
        self._passes[size] = RecordedPass(
            self._model,
            self._kv_cache,
            self._inputs[:, :size],
            self._values[:size],
            self._capture,
        )

    def fits(self, batch: ForwardBatch) -> bool:
        return (
            batch.form is AttentionForm.PLAIN
            and len(batch.tokens_per_rank) == 1
            and 0 < len(batch.token_ids) <= self._sizes[-1]
        )

    @torch.inference_mode()
    def hidden_rows(
        self, batch: ForwardBatch, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """As `DeepseekV3.hidden_rows`."""
        size = self._sizes[bisect_left(self._sizes, len(batch.token_ids))]
        self._fill(batch, size)
        return self._passes[size].run(batch, on_layer)

    def _fill(self, batch: ForwardBatch | None, size: int) -> None:
        """None: padding only."""
        num_tokens = 0
        if batch is not None:
            num_tokens = len(batch.token_ids)
            self._inputs[TOKEN_IDS, :num_tokens] = batch.token_ids
            self._inputs[POSITIONS, :num_tokens] = batch.positions
            self._inputs[SLOTS, :num_tokens] = batch.slots
        if num_tokens < size:
            self._inputs[: POSITIONS + 1, num_tokens:size] = 0
            self._inputs[SLOTS, num_tokens:size] = -1


class RecordedPass:
    """One size. `inputs` [3, T] int64: token ids, positions, slots; `values` [T, heads * V]."""

    def __init__(
        self,
        model: DeepseekV3,
        kv_cache: torch.Tensor,
        inputs: torch.Tensor,
        values: torch.Tensor,
        capture: Capture,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._inputs = inputs
        self._values = values
        self._plan: AttentionPlan | None = None
        self._is_row = inputs[SLOTS] >= 0
        count = len(model.layers)
        self._hidden: list[torch.Tensor] = []  # the residual stream before layer l
        self._queries: list[torch.Tensor] = []
        self._steps: list[Step] = []
        for layer in range(count):
            # Outputs of a step have their places before it is recorded.
            self._hidden.append(values)
            self._queries.append(values)
            self._steps.append(capture(partial(self._step, layer)))
            self._queries[layer] = capture.borrowed(self._queries[layer])
            if layer:
                self._hidden[layer - 1] = capture.borrowed(self._hidden[layer - 1])

    def run(self, batch: ForwardBatch, on_layer: Callable[[int], None] | None) -> torch.Tensor:
        model, num_tokens = self._model, len(batch.token_ids)
        plan = AttentionPlan.build(batch, model.config, model.rotation_table, self._kv_cache)
        last, caches = len(model.layers) - 1, model.caches(self._kv_cache)
        for index, (layer, cache) in enumerate(zip(model.layers, caches, strict=True)):
            self._steps[index]()
            if on_layer is not None:
                on_layer(index)
            if index < last:
                query = self._queries[index][:num_tokens]
                layer.attention.attend(query, plan, cache, self._values[:num_tokens])
        rows = batch.logit_rows
        hidden = self._hidden[last][:num_tokens]
        layer, query = model.layers[last], self._queries[last][:num_tokens]
        if model.mtp is not None:  # starts from all of them
            attended = layer.attention.attend(query, plan, caches[last])
        elif not len(rows):
            return hidden[:0]
        else:
            query = query if plan.wanted is None else query[rows]
            attended = layer.attend_wanted(query, plan, caches[last], rows)
            hidden = hidden[rows]
        update, hidden = layer.after_attention(
            layer.attention.out.forward(attended), hidden, (len(hidden),)
        )
        hidden = hidden + combined(update)
        if model.mtp is None:
            return hidden
        model.write_mtp(batch, hidden, self._kv_cache, on_layer)
        return hidden[rows]

    def _step(self, index: int) -> None:
        """From after the attention of the layer before to before that of layer `index`."""
        model = self._model
        if index == 0:
            positions, slots = self._inputs[POSITIONS], self._inputs[SLOTS]
            rotation = model.rotation_table.index_select(0, positions)
            self._plan = AttentionPlan(rotation=rotation, slots=slots)
            torch.ge(slots, 0, out=self._is_row)
            update: Update | None = None
            hidden = model.embedding.index_select(0, self._inputs[TOKEN_IDS])
        else:
            before = model.layers[index - 1]
            attended = before.attention.out.forward(self._values)
            update, hidden = before.after_attention(
                attended, self._hidden[index - 1], (len(self._values),), self._is_row
            )
        assert self._plan is not None
        self._queries[index], self._hidden[index] = model.layers[index].begin(
            update, hidden, self._plan, self._kv_cache[index]
        )


def can_record(model: DeepseekV3) -> bool:
    """Whether nothing in a layer waits for the host or for another rank."""
    return all(layer.mlp.waits_for_no_rank for layer in model.layers if isinstance(layer.mlp, Moe))


def prefill_sizes(longest: int) -> tuple[int, ...]:
    """Up to `longest` tokens, rising; none for 0."""
    return tuple(size for size in SIZES if size <= longest)
