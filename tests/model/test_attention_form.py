"""The choice between plain and absorbed attention."""

import pytest

from bench.attention_form import ways
from bench.kernel_case import Tensors
from model.attention_form import PLAIN_FROM, attention_form
from model.batch import AttentionForm

PLAIN, ABSORBED = AttentionForm.PLAIN, AttentionForm.ABSORBED


def cheaper(prefix: int, new: int) -> AttentionForm:
    """By FLOP for one head of DeepSeek-V3, counted from the definitions of the two forms."""
    latent, nope, rope, value = 512, 128, 64, 128
    seen = new * prefix + new * new / 2
    plain = (prefix + new) * latent * (nope + value) + seen * (nope + rope + value)
    absorbed = new * latent * (nope + value) + seen * (latent + rope + latent)
    return PLAIN if plain < absorbed else ABSORBED


@pytest.mark.parametrize("prefix", [0, 32, 64, 256, 1024, 4096])
def test_the_table_follows_the_cost(prefix: int) -> None:
    least = dict(PLAIN_FROM)[prefix]
    assert attention_form(prefix, least) is PLAIN
    assert cheaper(prefix, least) is PLAIN
    if least > 1:
        assert attention_form(prefix, least - 1) is ABSORBED
        assert cheaper(prefix, least - 1) is ABSORBED


def test_where_it_is_used_most() -> None:
    assert attention_form(0, 1) is PLAIN
    assert attention_form(5, 3000) is PLAIN
    assert attention_form(100_000, 2048) is PLAIN
    assert attention_form(100_000, 1) is ABSORBED
    assert attention_form(300, 60) is ABSORBED


@pytest.mark.parametrize(("prefix", "new"), [(-1, 1), (0, 0)])
def test_no_such_row(prefix: int, new: int) -> None:
    with pytest.raises(ValueError, match="no such row"):
        attention_form(prefix, new)


def test_what_is_measured_is_the_same_thing() -> None:
    """Both ways of the benchmark, at a small size on the CPU."""
    plain, absorbed = ways(Tensors("cpu"), 2, 70, 9)
    want, got = plain().float(), absorbed().float()  # type: ignore[attr-defined]
    assert want.shape == got.shape == (9, 2, 128)
    assert float((got - want).norm() / want.norm()) < 0.03
