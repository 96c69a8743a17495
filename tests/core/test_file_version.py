"""What counts as another version of a file."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from core.watched_files import file_version


def turn_link(file: Path) -> None:
    """`file` is a link to a link; the second one is swapped, as Kubernetes does."""
    (file.parent / "next").symlink_to(file.parent / "other")
    (file.parent / "next").replace(file.parent / "data")


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_text("longer"),
        lambda file: file.write_text("two"),
        lambda file: os.truncate(file, 0),
        lambda file: file.chmod(0o600),
        lambda file: os.utime(file, (1, 1)),
        turn_link,
    ],
    ids=["written", "of the same length", "emptied", "readable", "older", "link turned"],
)
def test_changes(tmp_path: Path, change: Callable[[Path], object]) -> None:
    for name in ("first", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("one")
    (tmp_path / "data").symlink_to(tmp_path / "first")
    file = tmp_path / "file"
    file.symlink_to(tmp_path / "data" / "file")
    probe = tmp_path / "probe"
    probe.touch()
    made = probe.stat().st_mtime_ns
    while probe.stat().st_mtime_ns == made:  # file systems keep time in steps of milliseconds
        probe.touch()
    before = file_version(file)
    file.read_text()
    assert file_version(file) == before is not None
    change(file)
    after = file_version(file)
    assert after is not None
    assert after != before


def test_what_is_not_there(tmp_path: Path) -> None:
    assert file_version(tmp_path / "nothing") is None
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert file_version(tmp_path / "link") is None
