"""What the autoscaler's queries say of clusters in all sorts of states, computed by promtool."""

import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import EXAMPLES, case
from tests.observability.tools import tool

# Whoever is first may have to fetch promtool.
pytestmark = pytest.mark.timeout(900)

MINE = 'namespace="serving",app_kubernetes_io_instance="epserve"'
SLOTS = 10
ROUTER = f'epserve_router_num_waiting_requests{{{MINE},instance="r0"}}'
Series = dict[str, float | str]


def of(name: str, role: str, instance: str, more: str = "") -> str:
    return f'{name}{{{MINE},role="{role}",instance="{instance}"{more}}}'


def worker(role: str, instance: str, **gauges: float) -> Series:
    """One that is ready and has nothing to do, but for `gauges`, named without epserve_."""
    facts = {"worker_draining": 0, "kv_info": 1, "kv_usage_ratio": 0}
    facts |= {f"num_{state}_requests": 0 for state in ("running", "waiting", "transferring")}
    facts |= {"max_running_requests": SLOTS} if role == "decode" else {}
    return {of(f"epserve_{name}", role, instance): v for name, v in (facts | gauges).items()}


def histogram(metric: str, labels: str, seconds: float, each_minute: int) -> Series:
    """Observations between half of `seconds`, a power of two, and all of it."""
    series: Series = {
        f'{metric}_bucket{{{labels},le="{bound:g}"}}': f"0+{count}x20"
        for bound, count in ((seconds / 2, 0), (seconds, each_minute), (float("inf"), each_minute))
    }
    return {name.replace('"inf"', '"+Inf"'): values for name, values in series.items()}


def prefilled(seconds: float, each_minute: int = 60) -> Series:
    """What two prefill workers have measured."""
    made: Series = {}
    for metric in ("worker_queue_time", "worker_time_to_first_token"):
        for instance in ("p0", "p1"):
            labels = f'{MINE},role="prefill",instance="{instance}"'
            made |= histogram(f"epserve_{metric}_seconds", labels, seconds, each_minute)
    return made


def cluster(**decode: float) -> Series:
    """Two workers of each role, and the decode workers' gauges."""
    return {
        ROUTER: 0,
        of("epserve_router_workers", "prefill", "r0", ',state="ready"'): 2,
        of("epserve_router_workers", "decode", "r0", ',state="ready"'): 2,
        **worker("prefill", "p0"), **worker("prefill", "p1"),
        **worker("decode", "d0", **decode), **worker("decode", "d1", **decode),
        **prefilled(1, each_minute=0),
        # Of another release, which is busy.
        'epserve_kv_usage_ratio{namespace="other",role="decode",instance="x"}': 1,
    }  # fmt: skip


def without(series: Series, *lost: str) -> Series:
    """Once there, gone for two scrapes: as for a target that does not answer."""
    gone = {n: "1 _x20" for n in series if any(f'instance="{one}"' in n for one in lost)}
    return series | gone


@dataclass(frozen=True)
class State:
    """Signals to what they say, 0 if left out; None: nothing."""

    name: str
    series: Series
    says: dict[str, float | None] = field(default_factory=dict)
    more: frozenset[str] = frozenset()  # roles that get more replicas
    unknown: frozenset[str] = frozenset()  # roles that keep theirs; all others get fewer


FULL = cluster(num_running_requests=SLOTS, kv_usage_ratio=0.9) | {ROUTER: 5}
SLOW_FOR_CLIENTS = histogram("epserve_time_to_first_token_seconds", MINE, 64, 60)
NO_PREFILL = {"queue-seconds": None, "first-token-seconds": None}
NO_DECODE = {"kv-use": None, "slot-use": None}
STATES = (
    State("idle", cluster()),
    State(
        "decode is full, prefill has nothing to do",
        FULL, {"slot-use": 1.25, "kv-use": 0.9}, more=frozenset({"decode"}),
    ),
    State(
        "first tokens are late because decode is full",
        FULL | SLOW_FOR_CLIENTS | prefilled(0.125),
        {"slot-use": 1.25, "kv-use": 0.9, "queue-seconds": 0.12, "first-token-seconds": 0.12},
        more=frozenset({"decode"}),
    ),
    State(
        "decode's slots are full of what prefill has not finished",
        cluster(num_transferring_requests=SLOTS) | SLOW_FOR_CLIENTS | prefilled(8) | {ROUTER: 5},
        {"queue-seconds": 7.6, "first-token-seconds": 7.6}, more=frozenset({"prefill"}),
    ),
    State(
        "the router has a queue, though decode has pages and slots are half prefill's",
        cluster(num_running_requests=5, num_transferring_requests=5) | {ROUTER: 20},
        {"slot-use": 1.0}, more=frozenset({"decode"}),
    ),
    State(
        "a worker of each role is not scraped",
        without(cluster(), "p0", "d1"), NO_PREFILL | NO_DECODE,
        unknown=frozenset({"prefill", "decode"}),
    ),
    State(
        "one that is full is not scraped, nor the router",
        without(FULL, "d0", "r0"), NO_PREFILL | NO_DECODE,
        unknown=frozenset({"prefill", "decode"}),
    ),
    State(
        "nothing is scraped",
        without(FULL, "d0", "d1", "p0", "p1", "r0"), NO_PREFILL | NO_DECODE,
        unknown=frozenset({"prefill", "decode"}),
    ),
    State(
        "prefill has work and finishes none of it",
        cluster() | {of("epserve_num_waiting_requests", "prefill", "p0"): 3}, NO_PREFILL,
        unknown=frozenset({"prefill"}),
    ),
    State(
        "a third decode worker loads, and one drains",
        cluster()
        | {of("epserve_worker_draining", "decode", "d2"): 0}
        | worker("decode", "d3", worker_draining=1),
    ),
)  # fmt: skip


@cache
def triggers() -> dict[str, tuple[str, str, float]]:
    """Role, query and threshold of each signal."""
    return {
        trigger["name"]: (
            each["metadata"]["labels"]["app.kubernetes.io/component"],
            trigger["metadata"]["query"],
            float(trigger["metadata"]["threshold"]),
        )
        for each in case(EXAMPLES / "values-keda.yaml") if each["kind"] == "ScaledObject"
        for trigger in each["spec"]["triggers"]
    }  # fmt: skip


def test_what_the_queries_say(tmp_path: Path) -> None:
    tests = []
    for state in STATES:
        series = [
            {"series": name, "values": value if isinstance(value, str) else f"{value:g}x20"}
            for name, value in state.series.items()
        ]
        checks = []
        for signal, (_, query, _) in triggers().items():
            said = state.says.get(signal, 0.0)
            samples = [] if said is None else [{"labels": "{}", "value": said}]
            # Binary fractions add up to nearly what they should.
            check = {"expr": f"round({query}, 0.01)", "eval_time": "10m"}
            checks.append(check | {"exp_samples": samples})
        tests.append({"name": state.name, "interval": "1m", "input_series": series}
                     | {"promql_expr_test": checks})  # fmt: skip
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump({"rule_files": [], "tests": tests}))
    done = subprocess.run(
        [tool("promtool"), "test", "rules", str(tmp_path / "suite.yaml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_what_becomes_of_replicas(state: State) -> None:
    """As the HorizontalPodAutoscaler decides: the largest counts; what is unknown forbids fewer."""
    more, unknown = set(), set()
    for signal, (role, _, threshold) in triggers().items():
        said = state.says.get(signal, 0.0)
        if said is None:
            unknown.add(role)
        elif said > 1.1 * threshold:
            more.add(role)
    assert (more, unknown - more) == (state.more, state.unknown)
    assert set(state.says) <= set(triggers())


def test_no_answer_is_an_error_to_keda() -> None:
    scaled = [e for e in case(EXAMPLES / "values-keda.yaml") if e["kind"] == "ScaledObject"]
    assert len(scaled) == 2
    for each in scaled:
        assert "fallback" not in each["spec"]
        for trigger in each["spec"]["triggers"]:
            assert trigger["metadata"]["ignoreNullValues"] == "false"
