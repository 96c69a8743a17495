"""The CUDA path of absorbed attention and what joins its splits, against the reference."""

import pytest
import torch

from kernels.attention import mla_decode_cuda
from kernels.attention.absorb import absorb_values
from kernels.attention.mla_decode import mla_decode_paged, mla_decode_reference, mla_decode_splits
from kernels.attention.mla_decode_splits import join_reference
from tests.kernels.tensors import generator, randn

WIDTH, VALUE_DIM, PAGE_TOKENS, SCALE = 576, 512, 64, 576**-0.5
OPTIONS = {"value_dim": VALUE_DIM, "scale": SCALE}
# heads, queries a row, lengths (0: no row)
CASES = [
    (128, 1, [1]),
    (128, 1, [192]),
    (128, 1, [5000]),
    (64, 1, [700, 65, 64, 128]),
    (192, 1, [700, 0, 1]),
    (128, 1, [1, 700, 64, 4096, 0, 65]),
    (128, 1, [2048] * 32),
    (128, 1, [0, 63, 129] * 50),
    (128, 3, [3, 700, 64, 1500, 0, 65]),
    (64, 8, [8, 700, 64, 0, 71] * 6),
    (128, 8, [8, 1500, 64, 0, 4096, 65]),
    (192, 8, [135, 8]),
    (64, 100, [100, 700, 0]),
]


def operands(
    test_id: str, heads: int, num_queries: int, lengths: list[int]
) -> tuple[torch.Tensor, ...]:
    """query, cache of shuffled pages of which one belongs to no row, block_table, kv_lengths."""
    rng = generator(test_id)
    counts = [-(-length // PAGE_TOKENS) for length in lengths]
    ids = torch.randperm(sum(counts) + 1, generator=rng).int().tolist()
    table = [[ids.pop() for _ in range(n)] + [0] * (max(counts) - n) for n in counts]
    query = randn(rng, num_queries * len(lengths), heads, WIDTH)
    cache = randn(rng, sum(counts) + 1, PAGE_TOKENS, WIDTH)
    floats = (each.to("cuda", torch.bfloat16) for each in (query, cache))
    return *floats, *(torch.tensor(each, dtype=torch.int32).cuda() for each in (table, lengths))


def wanted(given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    query, cache, table, lengths = given
    return mla_decode_reference(query.float(), cache.float(), table, lengths, **OPTIONS)


def norm_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Not a number anywhere is one here too."""
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("num_parts", [None, 1, 3])
@pytest.mark.parametrize(("heads", "num_queries", "lengths"), CASES)
def test_against_the_reference(
    request: pytest.FixtureRequest, heads: int, num_queries: int, lengths: list[int],
    num_parts: int | None,
) -> None:  # fmt: skip
    """Few parts are long stretches of several rows each, many a split of one row."""
    given = operands(request.node.nodeid, heads, num_queries, lengths)
    assert mla_decode_cuda.takes(*given[:2], VALUE_DIM)
    splits = mla_decode_cuda.launch(*given, scale=SCALE, num_parts=num_parts)
    got = join_reference(splits)
    assert norm_error(got, wanted(given)) < 1e-2
    again = mla_decode_cuda.launch(*given, scale=SCALE, num_parts=num_parts)
    assert torch.equal(join_reference(again), got)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "num_queries", "lengths"), CASES)
def test_by_way_of_the_operation(
    request: pytest.FixtureRequest, heads: int, num_queries: int, lengths: list[int]
) -> None:
    given = operands(request.node.nodeid, heads, num_queries, lengths)
    got = mla_decode_paged(*given, **OPTIONS)
    assert got.shape == (len(given[0]), heads, VALUE_DIM)
    assert norm_error(got, wanted(given)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 6, 15, 16, 17, 40])
def test_joined_as_they_are_multiplied(request: pytest.FixtureRequest, num_rows: int) -> None:
    lengths = ([1, 2000, 0, 65, 4096, 700] * 7)[:num_rows]
    given = operands(request.node.nodeid, 128, 1, lengths)
    kv_b = randn(generator(request.node.nodeid), 128, 256, VALUE_DIM).to("cuda", torch.bfloat16)
    values, scales = absorb_values(mla_decode_splits(*given, **OPTIONS), kv_b, 128, follows=True)
    got = values.float().view(num_rows, 128, 128) * scales.unsqueeze(-1)
    want = torch.einsum("thc,hvc->thv", wanted(given), kv_b[:, 128:].float())
    assert norm_error(got, want) < 4e-2


@pytest.mark.gpu
def test_against_flash_mla(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("flash_mla")
    from kernels.attention import mla_decode_flash

    given = operands(request.node.nodeid, 128, 1, [1, 700, 64, 4096, 65, 2048])
    schedule = mla_decode_flash.Schedule(given[3], 1, 128)
    want = mla_decode_flash.launch(*given, schedule, scale=SCALE)
    got = join_reference(mla_decode_cuda.launch(*given, scale=SCALE))
    assert norm_error(got, want.float()) < 1e-2


@pytest.mark.gpu
def test_scores_that_rise_stay_finite(request: pytest.FixtureRequest) -> None:
    """By more than sums can take from tile to tile, so that they are scaled."""
    query, cache, table, lengths = operands(request.node.nodeid, 128, 1, [2048, 300])
    cache[table[0].long()] *= torch.linspace(0.01, 1, 32, device="cuda").view(-1, 1, 1).bfloat16()
    given = query * 30, cache, table, lengths
    got = join_reference(mla_decode_cuda.launch(*given, scale=SCALE, num_parts=2))
    assert norm_error(got, wanted(given)) < 1e-2


@pytest.mark.gpu
def test_a_graph_follows_lengths_and_what_is_in_front(request: pytest.FixtureRequest) -> None:
    """New tokens and queries are written by the kernels in front; lengths change in between."""
    query, cache, table, lengths = operands(request.node.nodeid, 128, 1, [2048, 1000, 130, 64])
    given = torch.empty_like(query), cache.clone(), table, lengths
    kept = given[1].clone()
    graph = torch.cuda.CUDAGraph()
    mla_decode_paged(*given, **OPTIONS)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        given[0].copy_(query)
        given[1].copy_(cache)
        got = mla_decode_paged(*given, **OPTIONS)
    for new in ([2048, 1000, 130, 64], [1, 1024, 0, 63], [0, 0, 0, 0], [77, 640, 129, 2]):
        given[0].zero_()
        given[1].copy_(kept)
        cache.normal_()
        query.normal_()
        lengths.copy_(torch.tensor(new))
        graph.replay()
        want = wanted((query, cache, table, lengths))
        assert float((got.float() - want).norm()) <= 1e-2 * float(want.norm())


def test_other_sizes_are_not_for_it() -> None:
    def fits(
        query: tuple[int, ...], cache: tuple[int, ...], value_dim: int = 512,
        dtype: torch.dtype = torch.bfloat16,
    ) -> bool:  # fmt: skip
        operands = (torch.empty(shape, dtype=dtype, device="meta") for shape in (query, cache))
        return mla_decode_cuda.fits(*operands, value_dim)

    assert fits((7, 64, 576), (2, 64, 576))
    assert not fits((0, 64, 576), (2, 64, 576))
    assert not fits((7, 64, 576), (2, 64, 576), dtype=torch.float32)
    assert not fits((7, 16, 576), (2, 64, 576))
    assert not fits((7, 64, 576), (2, 32, 576))
    assert not fits((7, 64, 320), (2, 64, 320), value_dim=256)
