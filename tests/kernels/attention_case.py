"""A ragged batch over shuffled pages, and attention over it in float64, one query at a time."""

from dataclasses import dataclass

import torch

from tests.kernels.tensors import generator, randn

PAGE_TOKENS = 8


@dataclass(frozen=True)
class Case:
    """counts and lengths [B]: new tokens and cached tokens (new ones included) of each row."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    cache: torch.Tensor  # [pages, PAGE_TOKENS, width]
    query_start: torch.Tensor
    kv_lengths: torch.Tensor
    block_table: torch.Tensor

    def latents(self, row: int) -> torch.Tensor:
        """[length, width] float64."""
        pages = self.block_table[row].long()
        return self.cache[pages].flatten(0, 1)[: self.lengths[row]].double()

    def ragged(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        return self.query_start, self.kv_lengths, self.block_table, PAGE_TOKENS


def make_case(
    test_id: str, rows: tuple[tuple[int, int], ...], width: int
) -> tuple[Case, torch.Generator]:
    """`rows` are (new tokens, length) of each row."""
    rng = generator(test_id)
    counts, lengths = tuple(r[0] for r in rows), tuple(r[1] for r in rows)
    num_pages = [-(-length // PAGE_TOKENS) for length in lengths]
    shuffled = torch.randperm(sum(num_pages) + 3, generator=rng).tolist()
    table = [[shuffled.pop() for _ in range(n)] + [0] * (max(num_pages) - n) for n in num_pages]
    starts = [sum(counts[:i]) for i in range(len(rows) + 1)]
    case = Case(
        counts=counts,
        lengths=lengths,
        cache=randn(rng, sum(num_pages) + 3, PAGE_TOKENS, width),
        query_start=torch.tensor(starts, dtype=torch.int32),
        kv_lengths=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.tensor(table, dtype=torch.int32),
    )
    return case, rng


def attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """[V] from query [D], keys [S, D] and values [S, V], all float64."""
    return torch.softmax(scale * (keys @ query), dim=0) @ values
