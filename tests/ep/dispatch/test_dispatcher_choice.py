from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ep.dispatch.dispatch_needs import DispatchNeeds
from ep.dispatch.dispatcher_choice import RankFacts, choose
from ep.dispatch.rank_facts import _has_rdma, own_facts

NEEDS = DispatchNeeds(
    hidden=7168, itemsize=2, slots_per_rank=32, num_choices=8, step_tokens=2048, masked_tokens=64
)


def node(size: int, host: int = 1, *, rdma: bool = False) -> list[RankFacts]:
    """Ranks of one machine that is whole."""
    return [
        RankFacts(
            installed=True, hopper=True, host=host, device=index, peers=2**size - 1, rdma=rdma
        )
        for index in range(size)
    ]


def test_a_whole_machine_takes_deep_ep() -> None:
    for size in (2, 4, 8):
        for wanted in ("auto", "deep_ep"):
            assert choose(wanted, NEEDS, node(size)).name == "deep_ep"
    assert choose("collective", NEEDS, node(8)).name == "collective"


def test_machines_need_rdma_between_them() -> None:
    apart = node(8, 1) + node(8, 2)
    assert choose("auto", NEEDS, apart).reason.endswith("no RDMA between machines")
    connected = node(8, 1, rdma=True) + node(8, 2, rdma=True)
    assert choose("auto", NEEDS, connected).name == "deep_ep"
    half = connected[:12] + node(8, 2)[4:]
    assert "on ranks 12, 13, 14, 15" in choose("auto", NEEDS, half).reason


def test_a_node_of_deep_ep_is_one_machine() -> None:
    across = node(4, 1, rdma=True) + node(4, 2, rdma=True)
    choice = choose("auto", NEEDS, across)
    assert choice.name == "collective"
    assert "ranks 0 and 4 would have to be on one machine" in choice.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"installed": False}, "it is not installed on rank 1"),
        ({"hopper": False}, "no Hopper GPU or later on rank 1"),
        ({"peers": 0b1110}, "rank 1 does not reach the GPU of rank 0"),
    ],
)
def test_one_rank_that_cannot_is_named(changes: dict[str, int], reason: str) -> None:
    ranks = node(4)
    ranks[1] = ranks[1]._replace(**changes)
    assert reason in choose("auto", NEEDS, ranks).reason
    with pytest.raises(ValueError, match=f"deep_ep cannot be had: .*{reason}"):
        choose("deep_ep", NEEDS, ranks)


def test_shapes_that_deep_ep_does_not_know_are_named() -> None:
    assert "it moves bfloat16 only" in choose("auto", replace(NEEDS, itemsize=4), node(8)).reason
    assert "not of 3" in choose("auto", NEEDS, node(3)).reason
    without_masked = replace(NEEDS, hidden=1024, masked_tokens=0)
    assert choose("auto", without_masked, node(8)).name == "deep_ep"
    assert "not of 1024" in choose("auto", replace(NEEDS, hidden=1024), node(8)).reason


def test_one_rank_is_served_locally() -> None:
    for wanted in ("auto", "local", "collective"):
        assert choose(wanted, NEEDS, node(1)).name == "local"
    with pytest.raises(ValueError, match="not of 1"):
        choose("deep_ep", NEEDS, node(1))
    with pytest.raises(ValueError, match="serves one rank, the group has 2"):
        choose("local", NEEDS, node(2))


def test_facts_travel_as_numbers() -> None:
    facts = own_facts(torch.device("cpu"))
    assert not facts.installed
    assert facts == own_facts(torch.device("cpu"))
    assert all(0 <= number < 2**63 for number in facts)
    assert RankFacts(*map(int, facts)) == facts
    assert choose("auto", NEEDS, [facts, facts]).reason == "no DeepEP: it is not installed"


def test_rdma_is_told_by_the_driver(tmp_path: Path) -> None:
    assert not _has_rdma(tmp_path / "none")
    for name, driver in (("erdma_0", "erdma"), ("roce_1", "mlx5_core")):
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (tmp_path / "net" / name / "device").mkdir(parents=True)
        assert not _has_rdma(tmp_path / "net")
        (tmp_path / "net" / name / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert _has_rdma(tmp_path / "net")
