"""A MoE layer on a GPU: against the CPU, its forms against each other, and as a captured graph."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ep.dispatch.expert_shard import ExpertShard
from ep.dispatch.local import LocalDispatcher
from ep.placement.placement import Placement
from model.moe.moe import Moe
from tests.model.decode_rows import norm_error
from tests.model.moe.moe_layer import FORMATS, HIDDEN, load_moe, make_folders, padded

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kind", FORMATS)]

EXPERTS, SLOTS, CAP = 16, 20, 128
# Sums of bfloat16 products, and FP8 that is rounded the other way now and then.
NEAR = 2e-2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_folders(tmp_path_factory.mktemp("moe"))


def load(folder: Path, device: str, dtype: torch.dtype) -> Moe:
    """With four experts twice."""
    placement = Placement.trivial(1, EXPERTS, 1, SLOTS - EXPERTS)
    shard = ExpertShard.build(
        placement, 0, LocalDispatcher(SLOTS), device, aligned=LocalDispatcher(SLOTS),
        masked=LocalDispatcher(SLOTS, CAP),
    )  # fmt: skip
    return load_moe(folder, shard=shard, device=device, dtype=dtype)


def tokens(num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, HIDDEN, generator=generator).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("num_tokens", [1, 5, CAP])
def test_near_the_cpu(folders: dict[str, Path], kind: str, num_tokens: int) -> None:
    x = tokens(num_tokens)
    on_cpu = load(folders[kind], "cpu", torch.float32)
    want = on_cpu.decode(*padded(x.cpu().float(), CAP))[:num_tokens]
    moe = load(folders[kind], "cuda", torch.bfloat16)
    got = moe.decode(*padded(x, CAP))[:num_tokens]
    assert got.isfinite().all()
    # A gate that is nearly even may turn.
    assert norm_error(got.cpu(), want) < 0.1
    assert int((moe.counts.cpu() - on_cpu.counts).abs().sum()) <= 0.05 * num_tokens * 4


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 100, CAP])
def test_all_forms_are_near_each_other(
    folders: dict[str, Path], kind: str, num_tokens: int
) -> None:
    moe, x = load(folders[kind], "cuda", torch.bfloat16), tokens(num_tokens)
    want = replace(moe, aligned=None).forward(x, (num_tokens,))
    counted = moe.counts.clone()
    aligned = moe.forward(x, (num_tokens,))
    masked = moe.decode(*padded(x, CAP))[:num_tokens]
    assert torch.equal(moe.counts, 3 * counted)
    results = [(aligned, NEAR), (masked, NEAR)]
    if "int4" not in kind:
        fused = replace(moe, fused=True)
        results += [
            (fused.forward(x, (num_tokens,)), NEAR),
            (fused.decode(*padded(x, CAP))[:num_tokens], NEAR),
        ]
    for got, bound in results:
        assert got.shape == want.shape
        assert not num_tokens or norm_error(got, want) < bound


def test_two_forms_do_not_wait_for_the_host(folders: dict[str, Path], kind: str) -> None:
    moe, (x, is_row) = load(folders[kind], "cuda", torch.bfloat16), padded(tokens(9), 16)
    for mode in ("default", "error"):  # the first time it compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            moe.decode(x, is_row)
            moe.forward(x, (16,))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_as_a_captured_graph(folders: dict[str, Path], kind: str) -> None:
    """Replayed for other tokens, other padding and moved experts."""
    moe = load(folders[kind], "cuda", torch.bfloat16)
    x, is_row = padded(tokens(3), 24)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            moe.decode(x, is_row)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = moe.decode(x, is_row)
    for seed, num_tokens in ((1, 24), (2, 1), (3, 0), (4, 13)):
        if seed == 4:  # every expert's last copy is its only one
            last = moe.maps.num_replicas - 1
            physical = moe.maps.physical.gather(1, last.unsqueeze(1))
            moe.maps.physical[:, :1].copy_(physical)
            moe.maps.num_replicas.fill_(1)
        new_x, new_is_row = padded(tokens(num_tokens, seed), 24)
        x.copy_(new_x)
        is_row.copy_(new_is_row)
        before = moe.counts.clone()
        graph.replay()
        got, counted = out.clone(), moe.counts - before
        want = moe.decode(x, is_row)
        assert int(counted.sum()) == num_tokens * 4
        assert torch.equal(moe.counts - before, 2 * counted)
        assert torch.equal(got[:num_tokens], want[:num_tokens])
