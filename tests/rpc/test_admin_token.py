"""The operators' token: who is let in, and what a changing file does."""

import os
from pathlib import Path
from typing import Any, cast

import pytest

from core.errors import Unauthenticated
from rpc.admin_token import AdminToken, Context, bearer_metadata, passed_on


class Caller:
    """The context of a call with this metadata."""

    def __init__(self, metadata: tuple[tuple[str, Any], ...]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        return self._metadata


def caller(metadata: tuple[tuple[str, Any], ...]) -> Context:
    return cast("Context", Caller(metadata))


def lets_in(token: AdminToken, metadata: tuple[tuple[str, Any], ...]) -> bool:
    try:
        token.check(caller(metadata))
    except Unauthenticated:
        return False
    return True


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "sesame"),),
        (("authorization", "bearer sesame"),),
        (("authorization", "Bearer sesam"),),
        (("authorization", "Bearer sesame "),),
        (("authorization", b"Bearer sesame"),),
        (("authorization", "Bearer s\u00e9same"),),
        (("x-authorization", "Bearer sesame"),),
        (("authorization", "Bearer other"), ("authorization", "Bearer sesame")),
    ],
)
def test_only_who_knows_it_is_let_in(tmp_path: Path, metadata: tuple[Any, ...]) -> None:
    file = tmp_path / "token"
    file.write_text("sesame\n")
    token = AdminToken(file)
    assert not lets_in(token, metadata)
    assert lets_in(token, bearer_metadata("sesame"))


def test_without_a_file_everybody_is() -> None:
    assert lets_in(AdminToken(None), ())
    assert bearer_metadata("") == ()


def test_a_secret_that_kubernetes_turns_is_read_again(tmp_path: Path) -> None:
    """It is a link to a link to a folder, which is swapped."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(name)
        os.utime(tmp_path / name / "token", (1, 1))
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "token").symlink_to("data/token")
    token = AdminToken(tmp_path / "token")
    assert lets_in(token, bearer_metadata("one"))
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(tmp_path / "data")
    assert not lets_in(token, bearer_metadata("one"))
    assert lets_in(token, bearer_metadata("two"))


@pytest.mark.parametrize("content", ["", "  \n", "two words", "tab\there", "\u00e9t\u00e9"])
def test_what_holds_no_word_is_refused_and_later_not_believed(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(ValueError, match="token"):
        AdminToken(file)
    file.write_text("sesame")
    token = AdminToken(file)
    file.write_text(content)
    assert not lets_in(token, ())
    assert not lets_in(token, bearer_metadata(content.strip()))
    assert lets_in(token, bearer_metadata("sesame"))


def test_the_callers_own_word_is_passed_on() -> None:
    metadata = (("x-request-id", "1"), ("authorization", "Bearer sesame"), ("a-bin", b"x"))
    assert passed_on(caller(metadata)) == bearer_metadata("sesame")
