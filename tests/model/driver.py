"""Runs sequences through a model over paged KV with shuffled page ids, without any engine."""

from collections.abc import Sequence

import torch

from model.batch import AttentionForm, ForwardBatch
from model.config import ModelConfig
from model.deepseek import DeepseekV3

PAGE_TOKENS = 16


class PagedRunner:
    """A cache and its page tables. Sequences are named by small integers."""

    def __init__(
        self,
        model: DeepseekV3,
        *,
        num_pages: int = 128,
        page_tokens: int = PAGE_TOKENS,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.page_tokens = page_tokens
        self.cache = new_cache(model.config, num_pages, page_tokens, model)
        generator = torch.Generator().manual_seed(seed)
        self._free = torch.randperm(num_pages, generator=generator).tolist()
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def share(self, source: int, target: int, num_pages: int) -> None:
        """A new sequence whose first pages are those of another: a cached prefix."""
        self.pages[target] = self.pages[source][:num_pages]
        self.lengths[target] = num_pages * self.page_tokens

    def batch(
        self,
        chunks: dict[int, Sequence[int]],
        form: AttentionForm,
        all_rows: bool = False,
        tokens_per_rank: tuple[int, ...] | None = None,
    ) -> ForwardBatch:
        """New tokens of each sequence, in the given order; reserves their pages."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, tokens in chunks.items():
            pages = self.pages.setdefault(name, [])
            begin = self.lengths.get(name, 0)
            self.lengths[name] = begin + len(tokens)
            while len(pages) * self.page_tokens < self.lengths[name]:
                pages.append(self._free.pop())
            where = range(begin, self.lengths[name])
            ids += tokens
            positions += where
            slots += [
                pages[p // self.page_tokens] * self.page_tokens + p % self.page_tokens
                for p in where
            ]
            starts.append(len(ids))
        widest = max((len(self.pages[name]) for name in chunks), default=0)
        table = [self.pages[name] + [0] * (widest - len(self.pages[name])) for name in chunks]
        device = self.cache.device
        return ForwardBatch(
            token_ids=torch.tensor(ids, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            kv_lengths=torch.tensor(
                [self.lengths[n] for n in chunks], dtype=torch.int32, device=device
            ),
            block_table=torch.tensor(table, dtype=torch.int32, device=device).view(
                len(chunks), widest
            ),
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            logit_rows=(
                torch.arange(len(ids), device=device)
                if all_rows
                else torch.tensor(starts[1:], dtype=torch.int64, device=device) - 1
            ),
            form=form,
            tokens_per_rank=tokens_per_rank or (len(ids),),
        )

    def forward(
        self, chunks: dict[int, Sequence[int]], form: AttentionForm, all_rows: bool = False
    ) -> torch.Tensor:
        """Logits of the last token of each chunk, or of all tokens."""
        return self.model.forward(self.batch(chunks, form, all_rows), self.cache)

    def greedy(
        self, first: dict[int, int], count: int, form: AttentionForm
    ) -> dict[int, list[int]]:
        """`count` tokens for each sequence: its first one, and those that follow it."""
        produced = {name: [token] for name, token in first.items()}
        for _ in range(count - 1):
            chunks = {name: tokens[-1:] for name, tokens in produced.items()}
            best = self.forward(chunks, form).argmax(-1).tolist()
            for tokens, token in zip(produced.values(), best, strict=True):
                tokens.append(token)
        return produced


def new_cache(
    config: ModelConfig, num_pages: int, page_tokens: int, model: DeepseekV3
) -> torch.Tensor:
    return torch.zeros(
        config.num_kv_layers,
        num_pages,
        page_tokens,
        config.kv_dim,
        dtype=model.embedding.dtype,
        device=model.embedding.device,
    )


def load_all(folder: object, **options: object) -> DeepseekV3:
    """The whole model in float32 on the CPU, unless told otherwise."""
    arguments: dict[str, object] = {
        "device": "cpu",
        "dtype": torch.float32,
    }
    return DeepseekV3.load(folder, **{**arguments, **options})  # type: ignore[arg-type]
