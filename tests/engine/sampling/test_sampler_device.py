"""How tokens are chosen on a device, against how the CPU does it; here on the CPU as well."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.sampler import SampleRow, choose_on_device, draw, sample
from engine.sampling.sampling_params import Sampling

MASK = (1 << 64) - 1
VOCAB = 41


@st.composite
def sample_rows(draw: st.DrawFn) -> SampleRow:
    """Parameters that float32 holds exactly: then both are to agree whatever the logits are."""
    return SampleRow(
        sampling=Sampling(
            temperature=draw(st.sampled_from([0.0, 0.25, 1.0, 1.5])),
            top_p=draw(st.sampled_from([0.0, 0.125, 0.5, 0.75, 1.0])),
            top_k=draw(st.sampled_from([0, 1, 3, 17, 1000])),
            min_p=draw(st.sampled_from([0.0, 0.0625, 0.5, 1.0])),
            seed=draw(st.integers(0, MASK)),
        ),
        position=draw(st.integers(0, 200_000)),
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(sample_rows(), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    step=st.sampled_from([0.0, 1.0]),
)
def test_same_tokens(rows: list[SampleRow], seed: int, step: float) -> None:
    """With steps of 1 most rows have equal logits."""
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    if step:
        logits = (logits / step).round() * step
    expected = [out.token_id for out in sample(logits, rows)]
    assert choose_on_device(logits, rows).tolist() == expected


def mixed_rows(num: int) -> list[SampleRow]:
    """Of all kinds that need no history."""
    return [
        SampleRow(
            sampling=Sampling(
                temperature=(0.0, 0.7, 1.2)[index % 3],
                top_k=(0, 50)[index % 2],
                top_p=(1.0, 0.9)[index // 2 % 2],
                min_p=(0.0, 0.02)[index // 4 % 2],
                seed=index,
                logprobs=index % 5 == 0,
                top_logprobs=index % 4,
            ),
            position=100 + index,
            suppressed=(3, 5) if index % 7 == 0 else (),
        )
        for index in range(num)
    ]


@pytest.mark.gpu
def test_a_gpu_says_the_same_and_nobody_waits_for_it() -> None:
    rows = mixed_rows(64)
    logits = torch.randn(64, 129_280, generator=torch.Generator().manual_seed(2)) * 3
    expected = sample(logits, rows)
    on_gpu = logits.cuda()
    draw(on_gpu, rows)  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = draw(on_gpu, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, want in zip(drawn.tokens(), expected, strict=True):
        assert got.token_id == want.token_id
        assert got.logprob == pytest.approx(want.logprob, abs=1e-4)
        assert len(got.top) == len(want.top)
