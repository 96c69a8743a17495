"""Dispatcher over an all-gather and an all-to-all: sockets on the CPU, NCCL on GPUs.

The form with counts on the host:

    dispatch  every rank gets the hidden rows and expert ids of all tokens, packed into one
              all-gather padded to the longest rank, and keeps the rows of its experts
    combine   each (token, choice) row returns, unweighted, to the rank of its token, by one
              all-to-all; that rank adds them up with the weights, which never travel

Why rows and not a reduce-scatter of per-rank partial sums: partial sums would be added in an
order that depends on the placement. Like this the sum is taken over the same rows in the same
order as by `LocalDispatcher`, bit for bit, whatever the number of ranks; and K rows a token
are not more than R - 1 partial sums a token unless the group is smaller than K.

The forms with counts on the device gather the weights too, and combine as in `combine_exchange`:
exactly on the CPU, partial sums on GPUs, or as told. The masked form can be part of a captured
CUDA graph. The aligned one waits for the device once a dispatch, to learn how many rows are for
the experts of this rank: room for all that could be would be as many times too large as there
are ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ep.dispatch.combine_exchange import (
    CombineExchange,
    exchange_and_combine,
    one_of_each,
    to_return,
)
from ep.dispatch.dispatcher import (
    Computed,
    Dispatched,
    DispatchedAligned,
    DispatchedMasked,
    Payload,
    Rows,
)
from ep.dispatch.masked_rows import as_payload, blocks_of, check_tokens, mean_rows
from ep.dispatch.routes import Routes, plan_routes
from ep.dispatch.row_caps import PartHandle, RowPart, aligned_part, joined, row_parts
from ep.dispatch.weighted_sum import weighted_sum
from ep.group.group import EpGroup
from kernels.moe.pack_tokens import Unpacked, pack_tokens, unpack
from kernels.moe.permute import permute


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveHandle:
    """Of the form with counts on the host; weights [T, K] float32."""

    routes: Routes
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class NothingHandle:
    """No rank had a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeHandle:
    """Of `num_tokens` own tokens, which `way` pads to the longest rank's; None: no rank had any."""

    way: CombineExchange | None
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksHandle:
    """Of the masked form, as `to_return` wants it."""

    row_of: torch.Tensor
    weights: torch.Tensor
    own: ExchangeHandle


class CollectiveDispatcher:
    """All three forms. All ranks of the group call in the same order, with the same
    `tokens_per_rank`; the masked form with equally many tokens."""

    def __init__(
        self,
        group: EpGroup,
        slots_per_rank: int,
        max_tokens: int = 0,
        *,
        row_cap: int = 0,
        exact: bool | None = None,
    ) -> None:
        """`max_tokens` of the masked form; 0: there is no need of it. `row_cap` of the aligned one,
        as in `DispatchNeeds`. `exact` as in `combine_exchange`; None: on the CPU. ValueError when
        there is no slot."""
        if slots_per_rank < 1 or max_tokens < 0:
            raise ValueError(
                f"slots_per_rank must be at least 1, got {slots_per_rank}, for {max_tokens} tokens"
            )
        self._group = group
        self._slots_per_rank = slots_per_rank
        self._max_tokens = max_tokens
        self._row_cap = row_cap
        self._exact = exact
        # By T. Captured graphs read them: they stay.
        self._one_of_each: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def dispatch(
        self,
        hidden: torch.Tensor,  # [T, H] of 2 or 4 bytes an element
        topk_idx: torch.Tensor,  # [T, K] int64, physical expert ids
        topk_weights: torch.Tensor,  # [T, K] float32
        tokens_per_rank: tuple[int, ...],
        meanwhile: Callable[[], None] | None = None,
    ) -> Dispatched:
        num_tokens, num_choices = topk_idx.shape
        assert len(tokens_per_rank) == self._group.size, tokens_per_rank
        assert tokens_per_rank[self._group.rank] == num_tokens, (tokens_per_rank, num_tokens)
        longest = max(tokens_per_rank)
        if not longest:
            if meanwhile is not None:
                meanwhile()
            counts = torch.zeros(self._slots_per_rank, dtype=torch.int64)
            return Dispatched(hidden=hidden, expert_counts=counts, handle=NothingHandle())
        all_hidden, all_idx = self._gather(hidden, topk_idx, longest, meanwhile)
        routes = plan_routes(
            all_idx.cpu().numpy().astype("int64").reshape(-1, longest, num_choices),
            tokens_per_rank,
            rank=self._group.rank,
            slots_per_rank=self._slots_per_rank,
        )
        gathered_row = torch.from_numpy(routes.gathered_row).to(hidden.device)
        return Dispatched(
            hidden=all_hidden.index_select(0, gathered_row),
            expert_counts=torch.from_numpy(routes.expert_counts),
            handle=CollectiveHandle(routes=routes, weights=topk_weights),
        )

    def combine(self, expert_out: torch.Tensor, handle: object) -> torch.Tensor:
        """[N, H] -> [T, H] in the dtype of `expert_out`."""
        if isinstance(handle, NothingHandle):
            return expert_out
        assert isinstance(handle, CollectiveHandle), type(handle)
        routes, device = handle.routes, expert_out.device
        sent = expert_out.index_select(0, torch.from_numpy(routes.send_row).to(device))
        received = expert_out.new_empty((sum(routes.receive_rows), expert_out.shape[1]))
        self._group.collectives.all_to_all(received, routes.receive_rows, sent, routes.send_rows)
        row_of = torch.from_numpy(routes.row_of).to(device)
        return weighted_sum(received, row_of, handle.weights)

    def dispatch_aligned(
        self,
        hidden: torch.Tensor,  # [T, H]
        topk_idx: torch.Tensor,  # [T, K] int64, physical expert ids
        topk_weights: torch.Tensor,  # [T, K] float32
        tokens_per_rank: tuple[int, ...],
        payload: Payload,
        alignment: int,
        meanwhile: Callable[[], None] | None = None,
        rows: Rows | None = None,
    ) -> Iterator[DispatchedAligned]:
        """`rows` are not used: what travels is packed from `hidden`, quantised on the way."""
        rank, slots = self._group.rank, self._slots_per_rank
        assert tokens_per_rank[rank] == len(hidden), (tokens_per_rank, len(hidden))
        longest = max(tokens_per_rank)
        if longest:
            tokens = self._gather_packed(
                hidden, topk_idx, topk_weights, payload, longest, meanwhile
            )
        else:
            tokens = Unpacked(*as_payload(hidden, payload), topk_idx, topk_weights)
            if meanwhile is not None:
                meanwhile()
        values, topk_idx = tokens.hidden.contiguous(), tokens.topk_idx.long()
        first, own = rank * slots, slice(rank * longest, (rank + 1) * longest)
        slot = torch.where((topk_idx >= first) & (topk_idx < first + slots), topk_idx - first, -1)
        way = CombineExchange(own_idx=topk_idx[own], own_weights=tokens.weights[own])
        rest = ExchangeHandle(way=way if longest else None, num_tokens=len(hidden))

        def placed(part: RowPart) -> DispatchedAligned:
            permuted = permute(
                values[part.tokens],
                slot[part.tokens],
                slots,
                alignment=alignment,
                scale=None if tokens.scales is None else tokens.scales[part.tokens],
                most=part.num_rows,
            )
            return aligned_part(part, permuted, len(values), tokens.weights, rest)

        return map(placed, row_parts(slot, int((slot >= 0).sum()), self._row_cap))

    def dispatch_masked(
        self,
        hidden: torch.Tensor,  # [T, H]
        topk_idx: torch.Tensor,  # [T, K] int64, physical expert ids, -1: none; else distinct
        topk_weights: torch.Tensor,  # [T, K] float32
        payload: Payload,
        meanwhile: Callable[[], None] | None = None,
    ) -> DispatchedMasked:
        num_tokens, slots = len(hidden), self._slots_per_rank
        check_tokens(num_tokens, self._max_tokens)
        tokens = self._gather_packed(hidden, topk_idx, topk_weights, payload, num_tokens, meanwhile)
        if num_tokens not in self._one_of_each:
            self._one_of_each[num_tokens] = one_of_each(self._group.size, num_tokens, hidden)
        blocks = blocks_of(
            (tokens.hidden, tokens.scales), tokens.topk_idx, slots, first=self._group.rank * slots
        )
        way = CombineExchange(
            own_idx=topk_idx,
            own_weights=topk_weights,
            one_of_each=self._one_of_each[num_tokens],
        )
        own = ExchangeHandle(way=way, num_tokens=num_tokens)
        return DispatchedMasked(
            hidden=blocks.rows,
            scales=blocks.scales,
            counts=blocks.counts,
            handle=BlocksHandle(row_of=blocks.row_of, weights=tokens.weights, own=own),
            expected_rows=mean_rows(topk_idx.numel(), slots),
        )

    def combine_aligned(self, computed: Iterable[Computed]) -> torch.Tensor:
        """[T, H] in the dtype of what the experts made."""

        def of(rows: torch.Tensor, part: PartHandle[ExchangeHandle]) -> torch.Tensor:
            return self._to_return(rows, part.row_of, part.weights)

        return self._exchange(*joined(computed, of), None)

    def combine_masked(
        self, expert_out: torch.Tensor, handle: object, base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[S, C, H] -> [T, H] in the dtype of `expert_out`."""
        assert isinstance(handle, BlocksHandle), type(handle)
        returned = self._to_return(expert_out.flatten(0, 1), handle.row_of, handle.weights)
        return self._exchange(returned, handle.own, base)

    def _to_return(
        self, rows: torch.Tensor, row_of: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return to_return(rows, row_of, weights, self._slots_per_rank, exact=self._is_exact(rows))

    def _exchange(
        self, returned: torch.Tensor, own: ExchangeHandle, base: torch.Tensor | None
    ) -> torch.Tensor:
        if own.way is None:
            return returned.new_empty(0, returned.shape[-1])
        everything = exchange_and_combine(
            returned,
            own.way,
            self._group,
            self._slots_per_rank,
            exact=self._is_exact(returned),
            base=base,
        )
        return everything[: own.num_tokens]

    def _is_exact(self, rows: torch.Tensor) -> bool:
        return rows.is_cpu if self._exact is None else self._exact

    def _gather_packed(
        self,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        payload: Payload,
        longest: int,  # T of the rank that has most
        meanwhile: Callable[[], None] | None,
    ) -> Unpacked:
        """N = ranks * longest rows, those of rank r from r * longest on, with ids of -1 where a
        rank has no such token. `meanwhile` is called while they travel."""
        own = pack_tokens(
            hidden, topk_idx, weights, longest, quantises=payload.quantises, scale=payload.scale
        )
        everything = own.new_empty((self._group.size * longest, own.shape[1]))
        self._group.collectives.all_gather(everything, own, meanwhile)
        width, num_choices = hidden.shape[1], topk_idx.shape[1]
        dtype = torch.float8_e4m3fn if payload.quantises else hidden.dtype
        return unpack(everything, width, num_choices, dtype, payload.num_scales(width))

    def _gather(
        self,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor,
        longest: int,
        meanwhile: Callable[[], None] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden rows [R * longest, H] and expert ids [R * longest, K] int32 of all ranks.

        A packed row is the hidden row in whole 32-bit words, then K words of expert ids.
        """
        num_tokens, width = hidden.shape
        num_choices = topk_idx.shape[1]
        assert hidden.element_size() in (2, 4), hidden.dtype
        words = -(-width * hidden.element_size() // 4)
        own = hidden.new_empty((longest, words + num_choices), dtype=torch.int32)
        own[:num_tokens, :words].view(hidden.dtype)[:, :width] = hidden
        own[:num_tokens, words:] = topk_idx
        everything = own.new_empty((self._group.size * longest, words + num_choices))
        self._group.collectives.all_gather(everything, own, meanwhile)
        return everything[:, :words].view(hidden.dtype)[:, :width], everything[:, words:]
