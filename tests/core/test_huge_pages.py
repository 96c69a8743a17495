"""Huge pages: asked for where there is memory for them, and never needed."""

import sys
from pathlib import Path

import pytest

from core import huge_pages
from core.huge_pages import HUGE_PAGE_BYTES, use_huge_pages


def test_memory_stays_as_it_was() -> None:
    content = bytes(range(256)) * (8 * HUGE_PAGE_BYTES // 256)
    copy = bytearray(content)
    num_bytes = use_huge_pages()
    assert num_bytes % HUGE_PAGE_BYTES == 0
    assert num_bytes >= 0
    assert copy == content


def test_whole_pages_of_private_memory_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "00201000-00a00fff rw-p 00000000 00:00 0\n"
        "01000000-01200000 rw-p 00000000 00:00 0                          [heap]\n"
        "02000000-02100000 rw-p 00000000 00:00 0\n"  # too small
        "03000000-03400000 rw-p 00000000 08:01 123                        /lib/some name.so\n"
        "04000000-04400000 r-xp 00000000 00:00 0\n"
        "05000000-05400000 rw-p 00000000 00:00 0                          [stack]\n"
    )
    monkeypatch.setattr(huge_pages, "MAPS", maps)
    assert list(huge_pages._whole_huge_pages()) == [
        (0x400000, 0xA00000),
        (0x1000000, 0x1200000),
    ]
    monkeypatch.setattr(huge_pages, "MAPS", tmp_path / "nothing")
    assert use_huge_pages() == 0


def test_other_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert use_huge_pages() == 0
