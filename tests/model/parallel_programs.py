"""What ranks run to see that placements do not change what a model says."""

from pathlib import Path

import torch

from ep.dispatch.expert_shard import ExpertShard, make_dispatcher
from ep.group.group import EpGroup
from ep.placement.placement import Placement
from model.batch import AttentionForm
from tests.model.driver import PagedRunner, load_all

Logits = list[torch.Tensor]


def prompts_of(rank: int) -> dict[int, list[int]]:
    """By number of the sequence; rank 1 has none, and the others have unequal ones."""
    if rank == 1:
        return {}
    return {
        n: [(7 * i + 31 * n + rank) % 700 + 4 for i in range(5 + 9 * n)] for n in range(rank + 1)
    }


@torch.inference_mode()
def generate(
    runner: PagedRunner, group: EpGroup | None, rank: int, num_tokens: int
) -> tuple[list[list[int]], Logits]:
    """Greedy tokens of each sequence, and the logits [sequences, vocab] of each step, in step with
    the other ranks."""
    chunks = prompts_of(rank)
    tokens: list[list[int]] = [[] for _ in chunks]
    logits: Logits = []
    for step in range(num_tokens):
        own = sum(map(len, chunks.values()))
        counts = (own,) if group is None else tuple(n for (n,) in group.exchange([own]))
        form = AttentionForm.ABSORBED if step else AttentionForm.PLAIN
        logits.append(runner.model.forward(runner.batch(chunks, form, False, counts), runner.cache))
        best = logits[-1].argmax(-1).tolist()
        for sequence, token in zip(tokens, best, strict=True):
            sequence.append(token)
        chunks = {name: [token] for name, token in zip(chunks, best, strict=True)}
    return tokens, logits


def compare_with_one_rank(group: EpGroup, folder: Path, placement_json: str) -> int:
    """Asserts equal bits, and that all choices are counted; how many tokens were compared."""
    placement = Placement.from_json(placement_json)
    dispatcher = make_dispatcher(group, placement.slots_per_rank)
    shard = ExpertShard.build(placement, group.rank, dispatcher, "cpu")
    model = load_all(folder, experts=shard)
    for layer, moe in enumerate(model.moe_layers):
        assert len(moe.experts.down) == placement.slots_per_rank, "more than this rank holds"
        assert moe.maps.physical.shape[1] == placement.max_replicas, layer
    num_tokens = 4
    tokens, logits = generate(PagedRunner(model), group, group.rank, num_tokens)
    alone_tokens, alone_logits = generate(
        PagedRunner(load_all(folder)), None, group.rank, num_tokens
    )
    assert tokens == alone_tokens
    for step, (got, want) in enumerate(zip(logits, alone_logits, strict=True)):
        assert torch.equal(got, want), f"step {step}: {(got - want).abs().max()}"
    counts = shard.counts.sum(dim=1)
    prompts = prompts_of(group.rank)
    routed = sum(map(len, prompts.values())) + (num_tokens - 1) * len(prompts)
    assert counts.tolist() == [routed * model.config.experts_per_token] * placement.num_layers
    return sum(map(len, tokens))
