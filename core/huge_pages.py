"""Huge pages for the memory of a process that has started.

A request touches thousands of small pages all over the heap; in a virtual machine each that the
processor has no translation for costs several reads of memory. Where the system gives huge pages
on request (Linux: "madvise"), a process that asks spends a twentieth less time on a request.
"""

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

MAPS = Path("/proc/self/maps")
HUGE_PAGE_BYTES = 2 * 2**20

# Linux's numbers. The first is for pages to come, the second (since 6.1) moves those that are
# there, at once.
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25


def use_huge_pages() -> int:
    """For the private memory of this process; returns the bytes moved, 0 without such a system."""
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_bytes = 0
    for begin, end in list(_whole_huge_pages()):
        if madvise(begin, end - begin, _MADV_HUGEPAGE):
            continue
        # One by one: those that nothing was written to yet are refused.
        for page in range(begin, end, HUGE_PAGE_BYTES):
            if not madvise(page, HUGE_PAGE_BYTES, _MADV_COLLAPSE):
                num_bytes += HUGE_PAGE_BYTES
    return num_bytes


def _whole_huge_pages() -> Iterator[tuple[int, int]]:
    """Begin and end of memory that no file backs and that is written to."""
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        area, permissions, _, _, _, *name = line.split(maxsplit=5)
        if permissions != "rw-p" or name not in ([], ["[heap]"]):
            continue
        first, after = (int(address, 16) for address in area.split("-"))
        begin = -(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = after // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if begin < end:
            yield begin, end
