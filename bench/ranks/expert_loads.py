"""Loads of experts to balance: what they look like, and how they change.

A pattern gives two windows of load, [L, E] tokens each: one that a placement was made for, and the
one that it meets now. Where nothing drifts, both are drawn alike and have nothing to do with each
other.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Load = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, int], Load]
Drift = Callable[[np.random.Generator, Load], Load]

TOKENS = 1e6  # (token, choice) pairs of a layer in a window
NUM_GROUPS = 8


def _scaled(load: Load) -> Load:
    total = load.sum(axis=1, keepdims=True)
    scaled: Load = np.floor(load * (TOKENS / np.where(total > 0, total, 1)))
    return scaled


def _shuffled(rng: np.random.Generator, values: Load, num_layers: int) -> Load:
    """The same numbers in each layer, in another order."""
    return rng.permuted(np.tile(values, (num_layers, 1)), axis=1)


def _zipf(exponent: float) -> Draw:
    return lambda rng, num_layers, num_experts: _shuffled(
        rng, (np.arange(1, num_experts + 1) ** -exponent).astype(np.float64), num_layers
    )


def _lognormal(sigma: float) -> Draw:
    return lambda rng, num_layers, num_experts: rng.lognormal(0, sigma, (num_layers, num_experts))


def _topics(rng: np.random.Generator, num_layers: int, num_experts: int) -> Load:
    """Ten topics with tastes of their own, some of them much asked for."""
    tastes = rng.gamma(0.3, 1, (num_layers, 10, num_experts))
    demand = rng.dirichlet([0.5] * 10)
    load: Load = np.einsum("ltx,t->lx", tastes, demand)
    return load


def _favourites(count: int, others: float) -> Draw:
    """A few experts with equal loads, the others with a part of it."""

    def draw(rng: np.random.Generator, num_layers: int, num_experts: int) -> Load:
        load = np.full(num_experts, others)
        load[:count] = 1.0
        return _shuffled(rng, load, num_layers)

    return draw


def _neighbours(_: np.random.Generator, num_layers: int, num_experts: int) -> Load:
    """What one rank holds in the beginning has most of the load, another one in each layer."""
    load = np.full((num_layers, num_experts), 0.05)
    for layer in range(num_layers):
        begin = 8 * layer % (num_experts - 8)
        load[layer, begin : begin + 8] = 10.0
    return load


def _hot_group(rng: np.random.Generator, num_layers: int, num_experts: int) -> Load:
    """A group of experts has 60 % of the load."""
    load = rng.uniform(0.5, 1.5, (num_layers, NUM_GROUPS, num_experts // NUM_GROUPS))
    load /= load.sum(axis=(1, 2), keepdims=True)
    load *= 0.4
    hot = rng.integers(0, NUM_GROUPS, num_layers)
    load[np.arange(num_layers), hot] += 0.6 / (num_experts // NUM_GROUPS)
    return load.reshape(num_layers, num_experts)


def _worst_for_greedy(rng: np.random.Generator, num_layers: int, num_experts: int) -> Load:
    """Sizes for which packing the heaviest first is worst: 2n - 1 down to n, each twice."""
    half = num_experts // 2
    sizes = np.repeat(np.arange(2 * half - 1, half - 1, -1), 2).astype(np.float64)
    return _shuffled(rng, np.resize(sizes, num_experts), num_layers)


def _redraw(part: float) -> Drift:
    """Some experts have another load altogether: other topics are asked for."""

    def drift(rng: np.random.Generator, load: Load) -> Load:
        return np.where(rng.random(load.shape) < part, rng.gamma(0.5, 1, load.shape), load)

    return drift


def _hot_spots(rng: np.random.Generator, load: Load) -> Load:
    """Eight experts become eight times as hot."""
    after = load.copy()
    for row in after:
        row[rng.choice(len(row), 8, replace=False)] *= 8
    return after


STATIC: Mapping[str, Draw] = {
    "uniform": lambda _, *sizes: np.ones(sizes),
    # 32 tokens of 8 choices.
    "few tokens": lambda rng, layers, experts: rng.multinomial(
        256, [1 / experts] * experts, layers
    ).astype(np.float64),
    "nothing": lambda _, *sizes: np.zeros(sizes),
    "zipf 0.8": _zipf(0.8),
    "zipf 1.2": _zipf(1.2),
    "lognormal 0.5": _lognormal(0.5),
    "lognormal 1.5": _lognormal(1.5),
    "gamma": lambda rng, *sizes: rng.gamma(0.5, 1, sizes),
    "topics": _topics,
    "one expert": _favourites(1, 0.0),
    "eight experts": _favourites(8, 0.01),
    "half idle": _favourites(128, 0.0),
    "hot group": _hot_group,
    "one rank": _neighbours,
    "powers of two": lambda rng, layers, experts: _shuffled(
        rng, np.exp2(-(np.arange(experts) % 20.0)), layers
    ),
    "worst for greedy": _worst_for_greedy,
}
DRIFTING: Mapping[str, Drift] = {
    "jitter": lambda rng, load: load * rng.lognormal(0, 0.3, load.shape),
    "other topics": _redraw(0.1),
    # A part of the load is replaced by one of another kind.
    "mixture": lambda rng, load: (1 - 0.3) * load + 0.3 * rng.permuted(load, axis=1),
    "hot spots": _hot_spots,
}


def windows(name: str, seed: int, num_layers: int, num_experts: int) -> tuple[Load, Load]:
    """Two windows of a pattern of STATIC or DRIFTING, [L, E] tokens. KeyError for another name."""
    rng = np.random.default_rng((seed, *name.encode()))
    if name in STATIC:
        draw = STATIC[name]
        return tuple(_scaled(draw(rng, num_layers, num_experts)) for _ in range(2))  # type: ignore[return-value]
    before = rng.gamma(0.5, 1, (num_layers, num_experts))
    drifted = DRIFTING[name](rng, before)
    # What is counted in a window is never quite the demand.
    return tuple(rng.poisson(_scaled(load)).astype(np.float64) for load in (before, drifted))  # type: ignore[return-value]
