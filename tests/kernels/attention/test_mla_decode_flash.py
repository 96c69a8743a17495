"""FlashMLA as a path of absorbed attention: through a stand-in of its interface, and on a GPU."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from kernels.attention import mla_decode, mla_decode_cuda
from kernels.attention.mla_decode import mla_decode_paged, mla_decode_reference, mla_decode_schedule
from kernels.build import paths
from tests.kernels.tensors import generator, randn

HEADS, VALUE_DIM, WIDTH, PAGE_TOKENS = 64, 512, 576, 64
OPTIONS = {"value_dim": VALUE_DIM, "scale": 0.07}
LENGTHS = [70, 0, 64]  # and as many as there are queries


@dataclass
class FakeMetadata:
    made: int = 0


def fake_flash_mla(*, legacy: bool) -> ModuleType:
    """The two calls that are used, in terms of our reference; metadata filled by its first use."""
    module = ModuleType("flash_mla")

    def get_mla_metadata(*arguments: object) -> tuple[FakeMetadata, None]:
        assert len(arguments) == 3
        return FakeMetadata(), None

    def flash_mla_with_kvcache(
        q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor,
        cache_seqlens: torch.Tensor, head_dim_v: int, tile_scheduler_metadata: FakeMetadata,
        num_splits: None, *, softmax_scale: float, causal: bool, use_legacy: bool = False,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        assert use_legacy == legacy
        assert causal
        assert k_cache.shape[1:] == (PAGE_TOKENS, 1, WIDTH)
        tile_scheduler_metadata.made += 1
        out = mla_decode_reference(
            q.flatten(0, 1), k_cache.squeeze(2), block_table, cache_seqlens,
            value_dim=head_dim_v, scale=softmax_scale,
        )  # fmt: skip
        return out.view(*q.shape[:3], head_dim_v), None

    def without_legacy(*arguments: object, **options: object) -> tuple[torch.Tensor, None]:
        return flash_mla_with_kvcache(*arguments, **options)  # type: ignore[arg-type]

    module.get_mla_metadata = get_mla_metadata  # type: ignore[attr-defined]
    module.flash_mla_with_kvcache = (  # type: ignore[attr-defined]
        flash_mla_with_kvcache if legacy else without_legacy
    )
    module.has_legacy = lambda: True  # type: ignore[attr-defined]
    return module


@pytest.fixture(params=[True, False])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla(legacy=request.param))
    monkeypatch.delitem(sys.modules, "kernels.attention.mla_decode_flash", raising=False)
    monkeypatch.setattr(mla_decode, "best_path", lambda *_: "flash_mla")
    monkeypatch.setattr(mla_decode, "MAX_ROWS", 0)
    importlib.import_module("kernels.attention.mla_decode_flash")
    yield
    sys.modules.pop("kernels.attention.mla_decode_flash", None)


def operands(test_id: str, device: str, num_queries: int, heads: int) -> tuple[torch.Tensor, ...]:
    rng = generator(test_id)
    query = randn(rng, num_queries * 4, heads, WIDTH)
    cache = randn(rng, 9, PAGE_TOKENS, WIDTH)
    table = torch.tensor([[4, 7], [0, 0], [1, 0], [8, 0]], dtype=torch.int32)
    lengths = torch.tensor([*LENGTHS, num_queries], dtype=torch.int32)
    floats = (each.to(device, torch.bfloat16) for each in (query, cache))
    return *floats, table.to(device), lengths.to(device)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("num_queries", "heads"), [(1, HEADS), (2, HEADS), (8, HEADS), (8, 8)])
def test_one_schedule_a_step(request: pytest.FixtureRequest, num_queries: int, heads: int) -> None:
    given = operands(request.node.nodeid, "cpu", num_queries, heads)
    want = mla_decode_reference(*given, **OPTIONS)
    schedule = mla_decode_schedule(given[3], num_queries=num_queries, num_heads=heads)
    for layer in range(1, 4):
        assert torch.equal(mla_decode_paged(*given, **OPTIONS, schedule=schedule), want)
        assert schedule.metadata.made == layer  # type: ignore[union-attr]
    assert torch.equal(mla_decode_paged(*given, **OPTIONS), want)


@pytest.mark.usefixtures("installed")
def test_what_it_has_no_tiles_for(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few heads or odd ones, other pages, float32: our own kernel."""
    triton = ModuleType("kernels.attention.mla_decode_triton")
    triton.launch = lambda *_, **__: ("ours", None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels.attention.mla_decode_triton", triton)
    query, cache, table, lengths = operands(request.node.nodeid, "cpu", 1, HEADS)
    for given in (
        (query[:, :16], cache),
        (query, cache.view(-1, 32, WIDTH)),
        (query.float(), cache.float()),
    ):
        assert mla_decode_paged(*given, table, lengths, **OPTIONS) == "ours"
    for heads in (5, 20):
        assert mla_decode_paged(*operands("several", "cpu", 8, heads), **OPTIONS) == "ours"


@pytest.mark.usefixtures("installed")
def test_few_rows_are_ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = ModuleType("kernels.attention.mla_decode_triton")
    triton.launch = lambda *_, **__: ("ours", None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels.attention.mla_decode_triton", triton)
    monkeypatch.setattr(mla_decode_cuda, "is_built", lambda: True)
    for num_queries, most, is_ours in ((1, 4, True), (1, 3, False), (2, 4, False)):
        monkeypatch.setattr(mla_decode, "MAX_ROWS", most)
        given = operands(request.node.nodeid, "cpu", num_queries, HEADS)
        schedule = mla_decode_schedule(given[3], num_queries=num_queries, num_heads=HEADS)
        assert (schedule is None) is is_ours
        found = mla_decode_paged(*given, **OPTIONS, schedule=schedule)
        assert (found == "ours") if is_ours else isinstance(found, torch.Tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [5, 8, 20, 64, 128])
@pytest.mark.parametrize("num_queries", [1, 2, 8])
def test_on_a_gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, num_queries: int, heads: int
) -> None:
    monkeypatch.setattr(mla_decode, "MAX_ROWS", 0)
    pytest.importorskip("flash_mla")
    if paths.best_path("mla_decode", torch.device("cuda")) != "flash_mla":
        pytest.skip("not a device of FlashMLA")
    query, cache, table, lengths = operands(request.node.nodeid, "cuda", num_queries, heads)
    want = mla_decode_reference(query.float(), cache.float(), table, lengths, **OPTIONS)
    schedule = mla_decode_schedule(lengths, num_queries=num_queries, num_heads=heads)
    for _ in range(2):
        got = mla_decode_paged(query, cache, table, lengths, **OPTIONS, schedule=schedule)
        assert got.isfinite().all()
        assert float((got.float() - want).norm() / want.norm()) < 1e-2
