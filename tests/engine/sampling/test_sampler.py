"""The sampler against a naive one written row by row in numpy and Python integers."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.link.messages import (
    TokenOut,
)
from engine.sampling import sampler
from engine.sampling.sampler import SampleRow, sample
from engine.sampling.sampling_params import Sampling
from engine.sampling.uniform import seeds_to_int64, uniform

MASK = (1 << 64) - 1


def naive_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def naive_uniform(seed: int, position: int) -> float:
    gamma = 0x9E3779B97F4A7C15
    return (naive_mix((naive_mix(seed) + (position + 1) * gamma) & MASK) >> 11) / 2**53


def naive_kept(logits: np.ndarray, row: SampleRow) -> tuple[list[int], list[float]]:
    """Token ids left after the filters, most likely first, and their weights."""
    params = row.sampling
    scores = logits.astype(np.float64)
    scores[list(row.suppressed)] = -np.inf
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    weights = [math.exp((scores[t] - scores[order[0]]) / params.temperature) for t in order]
    if params.top_k:
        order, weights = order[: params.top_k], weights[: params.top_k]
    total, so_far, kept = sum(weights), 0.0, 0
    while kept < len(order) and (kept == 0 or so_far < (params.top_p or 1.0) * total):
        so_far += weights[kept]
        kept += 1
    while kept > 1 and (weights[kept - 1] < params.min_p or weights[kept - 1] == 0.0):
        kept -= 1
    return order[:kept], weights[:kept]


def naive_sample(logits: np.ndarray, row: SampleRow) -> int:
    if row.sampling.temperature == 0:
        scores = logits.copy()
        scores[list(row.suppressed)] = -np.inf
        return int(scores.argmax())
    order, weights = naive_kept(logits, row)
    target = naive_uniform(row.sampling.seed, row.position) * sum(weights)
    for token, reached in zip(order, np.cumsum(weights), strict=True):
        if target < reached:
            return token
    return order[-1]


@st.composite
def sample_rows(draw: st.DrawFn) -> SampleRow:
    return SampleRow(
        sampling=Sampling(
            temperature=draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 1.9])),
            top_p=draw(st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0])),
            top_k=draw(st.sampled_from([0, 1, 3, 17, 1000])),
            min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
            seed=draw(st.integers(0, MASK)),
            logprobs=draw(st.booleans()),
            top_logprobs=draw(st.integers(0, 5)),
        ),
        position=draw(st.integers(0, 200_000)),
        suppressed=tuple(draw(st.sets(st.integers(0, 22), max_size=5))),
    )


@pytest.fixture(params=[2, 5, 100])
def _few_candidates(request: pytest.FixtureRequest) -> Iterator[None]:
    """Few enough that some rows of these small vocabularies are decided by them, some not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "NUM_CANDIDATES", request.param)
        yield


@pytest.mark.usefixtures("_few_candidates")
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.lists(sample_rows(), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    step=st.sampled_from([0.0, 1.0]),
)
def test_tokens_equal_the_naive_sampler_and_do_not_depend_on_the_batch(
    rows: list[SampleRow], seed: int, step: float
) -> None:
    """With steps of 1 most rows have equal logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 23, generator=generator) * 3
    if step:
        logits = (logits / step).round() * step
    before = logits.clone()
    together = sample(logits, rows)
    assert torch.equal(logits, before)
    assert [out.token_id for out in together] == [
        naive_sample(logits[i].numpy(), row) for i, row in enumerate(rows)
    ]
    for i, row in enumerate(rows):
        assert sample(logits[i : i + 1], [row]) == [together[i]]
        assert together[i].token_id not in row.suppressed


@settings(max_examples=100, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, MASK), st.integers(0, 2**40)), min_size=1, max_size=20)
)
def test_uniform_equals_integer_arithmetic(pairs: list[tuple[int, int]]) -> None:
    seeds = torch.tensor(seeds_to_int64([seed for seed, _ in pairs]))
    drawn = uniform(seeds, torch.tensor([position for _, position in pairs])).tolist()
    assert drawn == [naive_uniform(seed, position) for seed, position in pairs]
    assert all(0.0 <= u < 1.0 for u in drawn)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def test_uniform_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    count, cells = 100_000, 100
    ascending, fixed = torch.arange(count), torch.full((count,), 7)
    for seeds, positions in ((fixed, ascending), (ascending, fixed), (ascending, ascending)):
        drawn = uniform(seeds, positions).numpy()
        observed = np.histogram(drawn, bins=cells, range=(0, 1))[0]
        # 99 degrees of freedom: below 150 but for one set of seeds in a thousand.
        assert chi_square(observed, np.full(cells, count / cells)) < 150
        neighbours = np.corrcoef(drawn[:-1], drawn[1:])[0, 1]
        assert abs(neighbours) < 0.02


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
)
@pytest.mark.usefixtures("_few_candidates")
def test_frequencies_are_those_of_the_filtered_distribution(params: dict[str, float]) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(5))
    count = 20_000
    rows = [
        SampleRow(sampling=Sampling(**params, seed=3), position=i)  # type: ignore[arg-type]
        for i in range(count)
    ]
    order, weights = naive_kept(logits[0].numpy(), rows[0])
    drawn = np.array([out.token_id for out in sample(logits.expand(count, -1), rows)])
    observed = np.array([(drawn == token).sum() for token in order])
    assert observed.sum() == count  # nothing outside the filter
    expected = np.array(weights) / sum(weights) * count
    assert chi_square(observed, expected) < 40  # at most 11 degrees of freedom: p < 4e-5


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 2
    rows = [
        SampleRow(sampling=Sampling(temperature=0.3, top_k=2, logprobs=True), position=9),
        SampleRow(sampling=Sampling(), position=9),
        SampleRow(
            sampling=Sampling(top_logprobs=4), position=9, suppressed=(int(logits[2].argmax()),)
        ),
    ]
    reference = logits.double().log_softmax(dim=1)
    first, second, third = sample(logits, rows)
    assert first.logprob == pytest.approx(float(reference[0, first.token_id]), abs=1e-5)
    assert first.top == ()
    assert second == TokenOut(token_id=int(logits[1].argmax()))
    assert third.logprob == pytest.approx(float(reference[2, third.token_id]), abs=1e-5)
    best = reference[2].argsort(descending=True)[:4].tolist()
    assert [token for token, _ in third.top] == best
    assert best[0] != third.token_id
    assert [prob for _, prob in third.top] == pytest.approx(reference[2, best].tolist(), abs=1e-5)


def test_extreme_logits_and_temperatures_give_a_token() -> None:
    hot = torch.tensor([[3e38, -3e38, 0.0], [-1e4, -1e4, -1e4], [0.0, 88.0, -torch.inf]])
    for temperature in (1e-6, 1.0, 1e6):
        rows = [
            SampleRow(sampling=Sampling(temperature=temperature, seed=i), position=i)
            for i in range(3)
        ]
        first, second, third = (out.token_id for out in sample(hot, rows))
        assert first == 0
        assert second in (0, 1, 2)
        assert third in (0, 1)
    assert sample(torch.zeros(0, 5), []) == []


def test_more_alternatives_than_tokens_gives_all_tokens() -> None:
    row = SampleRow(sampling=Sampling(top_logprobs=20), position=1)
    (out,) = sample(torch.tensor([[0.0, 2.0, 1.0]]), [row])
    assert [token for token, _ in out.top] == [1, 2, 0]
