"""Work beside the main line: done at once on a CPU, in a branch that comes back on a GPU."""

import pytest
import torch

from model.moe.side_work import SideWork


def test_on_a_cpu_work_is_done_at_once() -> None:
    side = SideWork(torch.device("cpu"))
    side.start(lambda: torch.ones(2))
    joined = side.join()
    assert joined is not None
    assert torch.equal(joined, torch.ones(2))
    assert side.join() is None


@pytest.mark.gpu
def test_a_branch_comes_back_under_capture() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(64, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side = SideWork(device)
        side.start(lambda: 2 * x)
        both = side.join()
        assert both is not None
        out = x + both
    x.fill_(3)
    graph.replay()
    assert torch.equal(out, torch.full_like(x, 9))
