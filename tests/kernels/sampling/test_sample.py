"""Drawing without sorting: Triton against the sorted reference, the reference against counting."""

import math
from itertools import product

import pytest
import torch

from kernels.sampling import sample_triton
from kernels.sampling.sample import BOUND, sample, sample_reference
from kernels.sampling.sample_triton import SampleShape
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED

VOCABULARY = 60 if INTERPRETED else 129_280
# In the interpreter, which needs a third of a second a row, several steps of fewer tokens.
SIZES = {"shape": SampleShape(part=32, capacity=8, block=64)} if INTERPRETED else {}
Knobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def knobs(rows: list[tuple[float, int, float, float, float]], device: str = "cpu") -> Knobs:
    """Rows of temperature, top_k, top_p, min_p, uniform."""
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64)
    columns = zip(*rows, strict=True)
    temperature, top_k, top_p, min_p, uniform = (
        torch.tensor(column, dtype=dtype, device=device)
        for column, dtype in zip(columns, dtypes, strict=True)
    )
    return temperature, top_k, top_p, min_p, uniform


def check(logits: torch.Tensor, given: Knobs) -> None:
    """Every token is the reference's, or that of a number as good as next to the given one."""
    device = logits.device
    out = sample_triton.launch(logits, *given, **SIZES)
    assert out.dtype == torch.int64
    temperature, top_k, top_p, min_p, uniform = given
    nearby = [
        sample_reference(logits, temperature, top_k, top_p + share, min_p, uniform + step)
        for share, step in ((0.0, 0.0), (0.0, BOUND), (0.0, -BOUND), (BOUND, 0.0), (-BOUND, 0.0))
    ]
    fits = torch.zeros(len(out), dtype=torch.bool, device=device)
    for want in nearby:
        fits |= out == want
    assert fits.all(), [(each.tolist(), out.tolist()) for each in nearby]
    same = (out == nearby[0]).float().mean()
    assert same >= 0.9, same  # the numbers are random: few lie next to a limit
    if not INTERPRETED:
        assert torch.equal(sample_triton.launch(logits, *given), out)


def test_reference_draws_with_the_probabilities(request: pytest.FixtureRequest) -> None:
    logits = randn(generator(request.node.nodeid), 1, 7)
    num = 4000
    uniform = [(i + 0.5) / num for i in range(num)]
    drawn = sample_reference(
        logits.expand(num, -1), *knobs([(0.7, 0, 1.0, 0.0, u) for u in uniform])
    )
    frequencies = torch.bincount(drawn, minlength=7) / num
    torch.testing.assert_close(
        frequencies, (logits[0] / 0.7).softmax(0), rtol=0, atol=2 / num
    )  # fmt: skip


def test_reference_cuts() -> None:
    # Probabilities 0.4, 0.3, 0.2, 0.1 of tokens 2, 0, 3, 1.
    logits = torch.tensor([[0.3, 0.1, 0.4, 0.2]]).log()
    for top_k, top_p, min_p, kept in (
        (0, 1.0, 0.0, [2, 0, 3, 1]), (2, 1.0, 0.0, [2, 0]), (0, 0.6, 0.0, [2, 0]),
        (0, 0.0, 0.0, [2, 0, 3, 1]), (3, 0.5, 0.0, [2, 0]), (0, 1.0, 0.45, [2, 0, 3]),
        (0, 1.0, 1.0, [2]), (1, 1.0, 0.0, [2]), (0, 1e-9, 0.0, [2]),
    ):  # fmt: skip
        rows = [(1.0, top_k, top_p, min_p, i / 400) for i in range(400)]
        drawn = sample(logits.expand(400, -1), *knobs(rows))
        assert list(dict.fromkeys(drawn.tolist())) == kept, (top_k, top_p, min_p)
    assert sample(logits, *knobs([(0.0, 3, 0.5, 0.1, 0.9)])).tolist() == [2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("scale", "every"),
    [(3.0, 6)] + [pytest.param(scale, 1, marks=pytest.mark.slow) for scale in (0.1, 3.0, 30.0)],
)
def test_all_filters(request: pytest.FixtureRequest, device: str, scale: float, every: int) -> None:
    """Peaked rows, which few tokens decide, and flat ones, for which all are looked at."""
    rng = generator(request.node.nodeid)
    filters = list(product((0, 1, 20, 60), (1.0, 0.9, 0.3), (0.0, 0.05)))
    temperatures = (0.3, 1.0, 1.7)
    uniform = torch.rand(len(filters), generator=rng).tolist()
    rows = [
        (temperatures[i % 3], *each, u)
        for i, (each, u) in enumerate(zip(filters, uniform, strict=True))
    ][::every]
    logits = (randn(rng, len(rows), VOCABULARY) * scale).to(device)
    check(logits, knobs(rows, device))


@pytest.mark.parametrize("device", DEVICES)
def test_ties_keep_the_order_of_tokens(request: pytest.FixtureRequest, device: str) -> None:
    rng = generator(request.node.nodeid)
    rows = [
        (1.0, 0, 1.0, 0.0, 0.37), (1.0, 40, 1.0, 0.0, 0.91), (1.0, 0, 0.5, 0.0, 0.99),
        (1.0, 0, 1.0, 1.0, 0.6), (0.0, 0, 1.0, 0.0, 0.6),
    ]  # fmt: skip
    few = torch.randint(-2, 3, (len(rows), VOCABULARY), generator=rng).float()
    few[few == 0] = -0.0
    few[:, ::2] += 0.0  # zeros of both signs are equal
    check(few.to(device), knobs(rows, device))
    check(torch.zeros(1, VOCABULARY, device=device), knobs(rows[:1], device))


@pytest.mark.parametrize("device", DEVICES)
def test_the_ends(request: pytest.FixtureRequest, device: str) -> None:
    """Nothing but one token, temperatures near zero and huge, numbers near one, huge logits."""
    rng = generator(request.node.nodeid)
    last = math.nextafter(1.0, 0.0)
    rows = [
        (1.0, 0, 1.0, 0.0, last), (1.0, 5, 0.9, 0.0, last), (1e-6, 0, 1.0, 0.0, 0.5),
        (1e-38, 0, 0.9, 0.0, 0.5), (100.0, 0, 1.0, 0.0, 0.5), (1.0, 10_000_000, 1.0, 0.0, 0.0),
        (1.0, 0, 1.0, 0.0, 0.0),
    ]  # fmt: skip
    given = knobs(rows, device)
    logits = randn(rng, len(rows), VOCABULARY)
    check(logits.to(device), given)
    check((logits[:1] * 1e30).to(device), knobs(rows[:1], device))
    logits[:, 1:] = -torch.inf
    few = knobs(rows[:2], device)
    assert not sample_triton.launch(logits[:2].to(device), *few, **SIZES).any()
    masked = randn(rng, len(rows), VOCABULARY).masked_fill_(
        torch.rand(len(rows), VOCABULARY, generator=rng) < 0.9, -torch.inf
    )
    check(masked[:2].to(device), few)
    nothing = torch.full((1, VOCABULARY), -torch.inf, device=device)
    alone = tuple(each[:1] for each in given)
    assert not sample_triton.launch(nothing, *alone, **SIZES).any()
    assert not sample_triton.launch(nothing[:0], *(each[:0] for each in given)).numel()


def test_what_does_not_fit_is_refused() -> None:
    given = knobs([(1.0, 0, 1.0, 0.0, 0.5)])
    with pytest.raises(ValueError, match="logits"):
        sample(torch.zeros(1, 4, dtype=torch.bfloat16), *given)
    with pytest.raises(ValueError, match="knobs must be"):
        sample(torch.zeros(1, 4), given[0].double(), *given[1:])
    with pytest.raises(ValueError, match=r"must be \[2\]"):
        sample(torch.zeros(2, 4), *given)
