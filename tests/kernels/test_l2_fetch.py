"""Fetching ahead changes nothing, and refuses what it cannot ask for."""

import pytest
import torch

from kernels.l2_fetch import l2_fetch


@pytest.mark.parametrize(
    ("rows", "num_bytes"),
    [
        (torch.zeros(4, 64, dtype=torch.int8), 32),
        (torch.zeros(64, dtype=torch.uint8), 32),
        (torch.zeros(4, 64, dtype=torch.uint8), 24),
        (torch.zeros(4, 64, dtype=torch.uint8), 80),
        (torch.zeros(4, 64, dtype=torch.uint8)[:, 8:], 16),
        (torch.zeros(4, 56, dtype=torch.uint8), 16),
        (torch.zeros(64, 4, dtype=torch.uint8).t(), 16),
    ],
)
def test_what_does_not_fit_is_refused(rows: torch.Tensor, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="rows"):
        l2_fetch(rows, num_bytes)


def test_nothing_changes_on_a_cpu() -> None:
    rows = torch.arange(256, dtype=torch.uint8).view(4, 64)
    l2_fetch(rows, 64)
    assert torch.equal(rows.flatten(), torch.arange(256, dtype=torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("num_bytes", [0, 16, 8192, 8208, 87040])
def test_bytes_stay_as_they_are(num_bytes: int) -> None:
    """At the end of an allocation, whole rows and parts of them, captured too."""
    rows = torch.randint(256, (300, 87040), dtype=torch.uint8, device="cuda")
    want = rows.clone()
    l2_fetch(rows, num_bytes)
    l2_fetch(rows[200:, : max(num_bytes, 16)], num_bytes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        l2_fetch(rows, num_bytes)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(rows, want)
