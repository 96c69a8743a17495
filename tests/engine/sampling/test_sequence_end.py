"""End rules, row by row."""

import pytest

from engine.link.messages import (
    Finish,
)
from engine.sampling.sampling_params import Sampling
from engine.sampling.sequence_end import finish_after, suppressed_token_ids

EOS = (2,)


@pytest.mark.parametrize(
    ("token_id", "num_tokens", "sampling", "expected"),
    [
        (7, 11, Sampling(max_tokens=5), Finish.NONE),
        (2, 11, Sampling(max_tokens=5), Finish.STOP),
        (2, 11, Sampling(max_tokens=5, ignore_eos=True), Finish.NONE),
        (9, 11, Sampling(max_tokens=5, stop_token_ids=(8, 9)), Finish.STOP),
        (9, 11, Sampling(max_tokens=5, stop_token_ids=(9,), ignore_eos=True), Finish.STOP),
        (7, 15, Sampling(max_tokens=5), Finish.LENGTH),
        (2, 15, Sampling(max_tokens=5), Finish.STOP),  # both: the stop is the reason
        (2, 11, Sampling(max_tokens=5, min_tokens=2), Finish.NONE),
        (2, 12, Sampling(max_tokens=5, min_tokens=2), Finish.STOP),
        (7, 20, Sampling(max_tokens=100), Finish.LENGTH),  # the model's context
        (7, 19, Sampling(max_tokens=100), Finish.NONE),
    ],
)
def test_finish(token_id: int, num_tokens: int, sampling: Sampling, expected: Finish) -> None:
    finish = finish_after(
        token_id,
        num_tokens=num_tokens,
        num_prompt_tokens=10,
        sampling=sampling,
        eos_token_ids=EOS,
        max_model_len=20,
    )
    assert finish is expected


@pytest.mark.parametrize(
    ("num_tokens", "sampling", "expected"),
    [
        (10, Sampling(), ()),
        (10, Sampling(min_tokens=1), ()),  # the first output token may end it: it is then one
        (10, Sampling(min_tokens=2), (2,)),
        (11, Sampling(min_tokens=2), ()),
        (10, Sampling(min_tokens=2, stop_token_ids=(5,)), (5, 2)),
        (10, Sampling(min_tokens=2, stop_token_ids=(5,), ignore_eos=True), (5,)),
    ],
)
def test_suppressed(num_tokens: int, sampling: Sampling, expected: tuple[int, ...]) -> None:
    ids = suppressed_token_ids(
        num_tokens=num_tokens, num_prompt_tokens=10, sampling=sampling, eos_token_ids=EOS
    )
    assert ids == expected
