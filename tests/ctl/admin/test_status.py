"""`ctl status` against a router that says what the test wants."""

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from ctl.admin.status import describe
from ctl.base.tables import format_age
from ctl.main import app
from proto import router_pb2, worker_pb2
from tests.ctl.admin.admin_server import ScriptedAdmin, admin_server

RUNNER = CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})


def identity(role: "worker_pb2.Role.ValueType", name: str) -> worker_pb2.ProcessIdentity:
    return worker_pb2.ProcessIdentity(
        role=role, name=name, address="127.0.0.1:9", epoch=f"epoch-{name}", pid=7, started_at=100.0,
        version="0.9",
    )  # fmt: skip


DECODE = identity(worker_pb2.ROLE_DECODE, "decode-0")
REPLY = router_pb2.GetStatusResponse(
    processes=[
        identity(worker_pb2.ROLE_ROUTER, "router"),
        identity(worker_pb2.ROLE_GATEWAY, "gateway"),
        DECODE,
    ],
    workers=[
        worker_pb2.WorkerStatus(
            identity=DECODE,
            model="tiny",
            ready=True,
            ranks=[
                worker_pb2.RankStatus(
                    rank=rank,
                    device="cpu",
                    num_running=3,
                    num_waiting=rank,
                    pages_total=256,
                    pages_free=200 + rank,
                    pid=50 + rank,
                    max_running=64,
                    quiet_seconds=(0.9, 75.2)[rank],
                )
                for rank in range(2)
            ],
        )
    ],
    rejected=[
        router_pb2.RejectedWorker(
            identity=identity(worker_pb2.ROLE_PREFILL, "prefill-9"), reason="other page size"
        )
    ],
    num_waiting=5,
    longest_wait_seconds=3.21,
    lost=[
        router_pb2.LostWorker(
            identity=identity(worker_pb2.ROLE_PREFILL, "prefill-0"), seconds=8.04, reason="silent"
        )
    ],
)


@pytest.fixture
def router() -> Iterator[str]:
    with admin_server(ScriptedAdmin(GetStatus=REPLY)) as address:
        yield address


def test_every_process_is_described_once() -> None:
    report = describe(REPLY, now=160.0)
    assert [(each["role"], each["name"]) for each in report["processes"]] == [
        ("router", "router"),
        ("gateway", "gateway"),
        ("decode", "decode-0"),
        ("prefill", "prefill-9"),
    ]
    assert report["processes"][0] == {
        "role": "router",
        "name": "router",
        "address": "127.0.0.1:9",
        "pid": 7,
        "epoch": "epoch-router",
        "started_at": 100.0,
        "version": "0.9",
        "age_seconds": 60.0,
    }
    (worker,) = report["workers"]
    assert worker["state"] == "ready"
    assert [rank["pages_free"] for rank in worker["ranks"]] == [200, 201]
    (rejected,) = report["rejected"]
    assert (rejected["name"], rejected["reason"]) == ("prefill-9", "other page size")
    assert (report["num_waiting"], report["longest_wait_seconds"]) == (5, 3.2)
    lost, quiet = report["stuck"]
    assert (lost["what"], lost["pid"], lost["seconds"]) == ("prefill-0 at 127.0.0.1:9", 7, 8.0)
    assert (quiet["what"], quiet["pid"], quiet["seconds"]) == ("decode-0 rank 1", 51, 75.2)


@pytest.mark.parametrize("option", ["--output=json", "--json"])
def test_json_is_all_that_is_on_stdout(router: str, option: str) -> None:
    result = RUNNER.invoke(app, ["status", option, "--router", router])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["processes"]) == 4


def test_tables(router: str) -> None:
    result = RUNNER.invoke(app, ["status", "--router", router])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any(
        line.split()[:6] == ["router", "router", "127.0.0.1:9", "7", "epoch-router", "0.9"]
        for line in lines
    )
    assert any(
        line.split() == ["decode-0", "ready", "1", "cpu", "51", "3", "1", "201", "256"]
        for line in lines
    )
    assert "rejected: prefill-9: other page size" in lines
    assert "requests waiting for a worker: 5, up to 3s" in lines
    assert [line for line in lines if line.startswith("stuck: ")] == [
        "stuck: prefill-0 at 127.0.0.1:9 (pid 7) for 8s: the router does not hear it (silent)",
        "stuck: decode-0 rank 1 (pid 51) for 1m 15s: no step has ended, 3 requests running and "
        "1 waiting on it",
    ]


def test_no_router_is_a_failure() -> None:
    result = RUNNER.invoke(app, ["status", "--router", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "no answer from the router" in result.stderr
    assert result.stdout == ""


def test_a_wrong_address_is_a_usage_error() -> None:
    result = RUNNER.invoke(app, ["status", "--router", "nowhere"])
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9, "0s"),
        (59, "59s"),
        (60, "1m 0s"),
        (3599, "59m 59s"),
        (3600, "1h 0m"),
        (90000, "1d 1h"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert format_age(seconds) == text
