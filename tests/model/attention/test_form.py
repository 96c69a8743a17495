"""The choice between plain and absorbed attention."""

import pytest

from bench.attention_form import ways
from bench.kernel_cases.case import Tensors
from kernels.attention.mla_decode_splits import MAX_QUERIES
from model.attention.form import PLAIN_FROM, attention_form
from model.batch import AttentionForm

PLAIN, ABSORBED = AttentionForm.PLAIN, AttentionForm.ABSORBED


def test_the_longer_the_prefix_the_later() -> None:
    assert PLAIN_FROM[0] == (0, 1), "every row has a form"
    assert list(PLAIN_FROM) == sorted(set(PLAIN_FROM))
    thresholds = [least for _, least in PLAIN_FROM]
    assert thresholds == sorted(thresholds)
    assert thresholds[-1] <= MAX_QUERIES, "absorbed rows fit into one call"


@pytest.mark.parametrize(("prefix", "least"), PLAIN_FROM)
def test_the_table(prefix: int, least: int) -> None:
    assert attention_form(prefix, least) is PLAIN
    if least > 1:
        assert attention_form(prefix, least - 1) is ABSORBED


def test_where_it_is_used_most() -> None:
    assert attention_form(0, 1) is PLAIN
    assert attention_form(5, 3000) is PLAIN
    assert attention_form(100_000, 2048) is PLAIN
    assert attention_form(100_000, 1) is ABSORBED
    assert attention_form(3000, 60) is ABSORBED


@pytest.mark.parametrize(("prefix", "new"), [(-1, 1), (0, 0)])
def test_no_such_row(prefix: int, new: int) -> None:
    with pytest.raises(ValueError, match="no such row"):
        attention_form(prefix, new)


def test_what_is_measured_is_the_same_thing() -> None:
    """Both ways of the benchmark, at a small size on the CPU; only one quantises latents."""
    plain, absorbed = ways(Tensors("cpu"), 2, 70, 9)
    want, got = plain().float(), absorbed().float()  # type: ignore[attr-defined]
    assert want.shape == got.shape == (9, 2, 128)
    assert float((got - want).norm() / want.norm()) < 0.05
