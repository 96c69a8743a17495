"""What the ranks of a group move tokens with, in all forms of it, chosen and made together."""

from dataclasses import dataclass
from typing import Any

import torch

from core.log import get_logger
from core.memory_term import MemoryTerm
from ep.dispatch.buffer_plan import collective_terms, deep_ep_terms, local_terms
from ep.dispatch.deep_ep import DeepEpDispatcher
from ep.dispatch.deep_ep_buffer import DeepEpBuffer
from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.dispatch.dispatcher import AlignedDispatcher, Dispatcher, MaskedDispatcher
from ep.dispatch.dispatcher_choice import Choice, DispatcherName, RankFacts, Wanted, choose
from ep.dispatch.expert_shard import make_dispatcher
from ep.dispatch.rank_facts import deep_ep_library, own_facts
from ep.group.group import EpGroup

log = get_logger("ep.dispatchers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatchers:
    """`aligned` and `masked` are None where they are not asked for, `dispatcher` where `masked` is
    all there is; `buffer` where it is not DeepEP. All but `masked` take `step_tokens` of a rank at
    once, 0: any number."""

    choice: Choice
    dispatcher: Dispatcher | None
    aligned: AlignedDispatcher | None
    masked: MaskedDispatcher | None
    step_tokens: int = 0
    buffer: DeepEpBuffer | None = None

    def close(self) -> None:
        """Before the group, on all ranks."""
        if self.buffer is not None:
            self.buffer.close()


def agree(group: EpGroup, wanted: Wanted, needs: DispatchNeeds, device: torch.device) -> Choice:
    """What all ranks decide, from what all of them tell. ValueError, on all of them, when what is
    wanted cannot be had."""
    ranks = [RankFacts(*facts) for facts in group.exchange(own_facts(device))]
    choice = choose(wanted, needs, ranks)
    _tell(group, choice)
    return choice


def dispatch_terms(
    name: DispatcherName, needs: DispatchNeeds, num_ranks: int
) -> tuple[MemoryTerm, ...]:
    """What the dispatchers of a rank take of its device, by term."""
    if name == "deep_ep":
        return deep_ep_terms(needs, num_ranks)
    return collective_terms(needs, num_ranks) if name == "collective" else local_terms(needs)


def make_dispatchers(
    group: EpGroup, choice: Choice, needs: DispatchNeeds, device: torch.device
) -> Dispatchers:
    """Allocates what `dispatch_terms` says. ValueError, on all ranks, when DeepEP does not begin
    and nothing else will do."""
    if choice.name == "deep_ep":
        made = with_deep_ep(deep_ep_library(), group, choice, needs)
        if made is not None:
            return made
        choice = Choice(name="collective", reason="DeepEP does not begin")
        _tell(group, choice)
    dispatcher = make_dispatcher(
        group, needs.slots_per_rank, needs.masked_tokens, row_cap=needs.row_cap
    )
    return Dispatchers(
        choice=choice,
        dispatcher=dispatcher,
        aligned=dispatcher if device.type == "cuda" else None,
        masked=dispatcher if needs.masked_tokens else None,
        step_tokens=needs.part_tokens,
    )


def with_deep_ep(
    library: Any,  # noqa: ANN401
    group: EpGroup,
    choice: Choice,
    needs: DispatchNeeds,
) -> Dispatchers | None:
    """`library` is the module `deep_ep`. None, on all ranks, when one of them cannot begin; where
    they do not all fail at once, they fall out of step and end with Unavailable."""
    failure, buffer = "", None
    try:
        buffer = DeepEpBuffer(library, group, [needs])
    except RuntimeError as error:
        failure = str(error)
        log.warning("DeepEP does not begin", rank=group.rank, reason=failure)
    began = group.exchange((int(not failure),))
    if buffer is None or (0,) in began:
        if choice.is_wish:
            reason = failure or f"rank {began.index((0,))} fails"
            raise ValueError(f"ep-dispatcher deep_ep cannot be had: {reason}")
        return None
    dispatcher = DeepEpDispatcher(buffer, needs)
    return Dispatchers(
        choice=choice,
        dispatcher=None if needs.masked_only else dispatcher,
        aligned=None if needs.masked_only else dispatcher,
        masked=dispatcher if needs.masked_tokens else None,
        step_tokens=needs.part_tokens,
        buffer=buffer,
    )


def _tell(group: EpGroup, choice: Choice) -> None:
    if group.rank == 0:
        log.info("dispatcher", chosen=choice.name, reason=choice.reason)
