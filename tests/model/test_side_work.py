"""Work beside the main line: done at once on a CPU, in branches that come back on a GPU."""

import pytest
import torch

from kernels.l2_fetch import l2_fetch
from model.side_work import SideWork


def test_on_a_cpu_work_is_done_at_once_and_nothing_is_fetched() -> None:
    asked: list[str] = []
    side = SideWork(torch.device("cpu"))
    side.fetch(lambda: asked.append("bytes"))
    side.start(lambda: torch.ones(2))
    joined = side.join()
    assert joined is not None
    assert torch.equal(joined, torch.ones(2))
    assert side.join() is None
    assert not asked


@pytest.mark.gpu
@pytest.mark.parametrize("starts", [False, True])
def test_branches_come_back_under_capture(starts: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x, rows = torch.ones(64, device=device), torch.zeros(8, 4096, dtype=torch.uint8, device=device)
    l2_fetch(rows, 4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side = SideWork(device)
        side.fetch(lambda: l2_fetch(rows, 4096))
        if starts:
            side.start(lambda: 2 * x)
        both = side.join()
        out = x + both if both is not None else x + 1
    x.fill_(3)
    graph.replay()
    assert torch.equal(out, torch.full_like(x, 9 if starts else 4))
