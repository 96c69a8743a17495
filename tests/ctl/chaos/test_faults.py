"""Schedules of faults and their text."""

import random
from dataclasses import replace

import pytest

from ctl.chaos.faults import Fault, Kind, Layout, make_schedule, read_scenario, write_scenario

LAYOUT = Layout(
    roles=(
        ("gateway", "gateway"), ("router-0", "router"), ("router-1", "router"),
        ("prefill-0", "prefill"), ("prefill-0/0", "prefill"),
        ("decode-0", "decode"), ("decode-0/0", "decode"), ("decode-1", "decode"),
        ("decode-1/0", "decode"),
    ),
    has_proxies=True,
    makes_token=True,
)  # fmt: skip


def test_a_schedule_follows_from_its_seed_and_can_be_read_back() -> None:
    for seed in random.Random(5).sample(range(10**6), 20):
        faults = make_schedule(seed, LAYOUT, count=200, rate=2.0)
        assert faults == make_schedule(seed, LAYOUT, count=200, rate=2.0)
        assert faults != make_schedule(seed + 1, LAYOUT, count=200, rate=2.0)
        assert read_scenario(write_scenario(faults, f"seed {seed}")) == faults
        assert [*faults] == sorted(faults, key=lambda fault: fault.at_seconds)
        assert 60 < faults[-1].at_seconds < 160
        assert {fault.kind for fault in faults} == set(Kind)


def test_only_processes_die_that_others_stand_in_for() -> None:
    faults = make_schedule(1, LAYOUT, count=300, rate=1, kinds=[Kind.KILL])
    victims = {"router-0", "router-1", "decode-0", "decode-0/0", "decode-1", "decode-1/0"}
    assert {fault.targets[0] for fault in faults} == victims


def test_only_processes_are_parted_that_call_each_other() -> None:
    faults = make_schedule(1, LAYOUT, count=500, rate=1, kinds=[Kind.PARTITION, Kind.DELAY])
    routers, decoders = ("router-0", "router-1"), ("decode-0", "decode-1")
    links = {("gateway", other) for other in (*routers, *decoders)}
    links |= {(router, other) for router in routers for other in ("prefill-0", *decoders)}
    links |= {("prefill-0", decoder) for decoder in decoders}
    assert {fault.targets for fault in faults} == links


def test_what_a_cluster_cannot_be_hit_by_is_not_drawn() -> None:
    poor = replace(LAYOUT, has_proxies=False, makes_token=False)
    kinds = {fault.kind for fault in make_schedule(3, poor, count=300, rate=1)}
    assert kinds == set(Kind) - {Kind.PARTITION, Kind.DELAY, Kind.CORRUPT_FILE}
    with pytest.raises(ValueError, match="nothing here can be hit by partition"):
        make_schedule(3, poor, count=1, rate=1, kinds=[Kind.PARTITION])


def test_a_scenario_as_people_write_it() -> None:
    text = """
    # two at once
    4 stop router-1 for 3.2   # a comment
    2.5 kill decode-0/1

    6.1 delay decode-0 prefill-1 for 4 by 0.25
    7 full-pool for 1
    """
    assert [str(fault) for fault in read_scenario(text)] == [
        "2.50 kill decode-0/1",
        "4.00 stop router-1 for 3.20",
        "6.10 delay decode-0 prefill-1 by 0.25 for 4.00",
        "7.00 full-pool for 1.00",
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("soon kill router", "could not convert"),
        ("1", "not enough values"),
        ("1 bite router for 2", "'bite' is not a valid Kind"),
        ("1 kill", "takes 1 different"),
        ("1 kill router for 2", "all but kills"),
        ("1 stop router", "all but kills"),
        ("1 stop router decode-0 for 2", "takes 1 different"),
        ("1 partition router router for 2", "takes 2 different"),
        ("1 partition router decode-0 by 1 for 2", "delays, and they alone"),
        ("1 delay router decode-0 for 2", "delays, and they alone"),
        ("1 full-pool gateway for 2", "takes 0 different"),
        ("-1 kill router", "from 0 to a million"),
        ("1 stop router for nan", "from 0 to a million"),
        ("1 stop router for inf", "from 0 to a million"),
    ],
)
def test_what_is_no_fault(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Fault.parse(line)
