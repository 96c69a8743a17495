"""Commands that look at and change a running cluster: what they print and how they end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import ctl.admin.drain
from core.errors import InvalidRequest, NotFound, Unauthenticated, Unavailable
from ctl.admin.connection import AdminConnection, NoAnswer
from ctl.base.tables import format_duration
from ctl.main import app
from proto import router_pb2
from proto.worker_pb2 import (
    ROLE_DECODE,
    ROLE_GATEWAY,
    ROLE_PREFILL,
    ExpertGroup,
    ProcessIdentity,
    RankStatus,
    RequestLeg,
    WorkerRefText,
    WorkerStatus,
)
from tests.ctl.admin.admin_server import ScriptedAdmin, admin_server

RUNNER = CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})

DECODE = ProcessIdentity(
    role=ROLE_DECODE, name="decode-0", address="10.0.0.1:7000", epoch="d-0", started_at=100.0,
    version="0.9",
)  # fmt: skip
GATEWAY = ProcessIdentity(role=ROLE_GATEWAY, name="gateway", address="10.0.0.9:8000", epoch="g-0")


def worker(**fields: Any) -> WorkerStatus:
    rank = RankStatus(num_running=3, num_waiting=1, pages_total=200, pages_free=150)
    values = {"ready": True, "num_open": 4, "num_accepted_total": 99, "ranks": [rank, rank]}
    group = ExpertGroup(name="decode-0")
    return WorkerStatus(identity=DECODE, expert_group=group, **(values | fields))


def status(*workers: WorkerStatus, **fields: Any) -> router_pb2.GetStatusResponse:
    return router_pb2.GetStatusResponse(workers=workers, **fields)


class Cluster:
    """`ctl` with a router that answers from `admin.replies`."""

    def __init__(self, admin: ScriptedAdmin, address: str) -> None:
        self.admin = admin
        self.address = address

    def ctl(self, line: str, **environment: str) -> Result:
        return RUNNER.invoke(app, [*line.split(), "--router", self.address], env=environment)

    def json(self, line: str) -> Any:
        result = self.ctl(f"{line} --output json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    admin = ScriptedAdmin(
        GetStatus=status(worker()),
        DrainWorker=router_pb2.DrainWorkerResponse(worker=DECODE),
    )
    with admin_server(admin) as address:
        yield Cluster(admin, address)


def test_workers(cluster: Cluster) -> None:
    rejected = router_pb2.RejectedWorker(identity=DECODE, reason="other page size")
    (told,) = cluster.json("workers")
    assert (told["name"], told["state"], told["kv_usage"]) == ("decode-0", "ready", 0.25)
    assert (told["num_running"], told["num_waiting"], told["num_open"]) == (6, 2, 4)
    assert told["expert_group"] == "decode-0"
    assert len(told["ranks"]) == 2
    lines = cluster.ctl("workers").stdout.splitlines()
    assert lines[1].split()[:-2] == [
        "decode-0", "decode", "0.9", "ready", "10.0.0.1:7000", "2", "4", "6", "2", "25%", "99",
    ]  # fmt: skip
    cluster.admin.replies["GetStatus"] = status(worker(), rejected=[rejected])
    result = cluster.ctl("workers")
    assert " rejected " in result.stdout
    assert "rejected: decode-0: other page size" in result.stdout


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"ready": False}, "starting"),
        ({"draining": True}, "draining"),
        ({"draining": True, "drained": True}, "drained"),
    ],
)
def test_states(cluster: Cluster, fields: dict[str, bool], state: str) -> None:
    cluster.admin.replies["GetStatus"] = status(worker(**fields))
    (told,) = cluster.json("workers")
    assert told["state"] == state


def test_draining(cluster: Cluster) -> None:
    result = cluster.ctl("drain decode-0")
    assert result.exit_code == 0, result.output
    assert result.stdout == "decode-0 (10.0.0.1:7000) is draining\n"
    (request,) = cluster.admin.requests("DrainWorker")
    assert (request.worker, request.undo) == ("decode-0", False)
    assert not request.HasField("grace_seconds")
    cluster.ctl("drain decode-0 --grace 0")
    assert cluster.admin.requests("DrainWorker")[-1].HasField("grace_seconds")
    told = cluster.json("undrain decode-0")
    assert told == {
        "name": "decode-0", "address": "10.0.0.1:7000", "epoch": "d-0", "state": "ready",
    }  # fmt: skip
    assert cluster.admin.requests("DrainWorker")[-1].undo


def test_waiting_until_drained(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [worker(draining=True), worker(draining=True, num_open=1)]
    done = worker(draining=True, num_open=0, drained=True)
    cluster.admin.replies["GetStatus"] = [status(each) for each in (*steps, done)]
    result = cluster.ctl("drain decode-0 --wait --output json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["state"] == "drained"
    assert result.stderr.splitlines() == ["decode-0: 4 requests open", "decode-0: 1 requests open"]
    # A worker that has ended meanwhile, or was started again, needs no waiting for.
    other = worker()
    other.identity.epoch = "d-1"
    cluster.admin.replies["GetStatus"] = [status(steps[0]), status(other)]
    assert cluster.json("drain decode-0 --wait")["state"] == "gone"
    # A router that has just been started knows no worker yet.
    cluster.admin.replies["GetStatus"] = [status(), status(), status(done)]
    assert cluster.json("drain decode-0 --wait")["state"] == "drained"
    monkeypatch.setattr(ctl.admin.drain, "_GONE_SECONDS", 0.3)
    cluster.admin.replies["GetStatus"] = status()
    assert cluster.json("drain decode-0 --wait")["state"] == "gone"
    cluster.admin.replies["GetStatus"] = status(steps[0])
    result = cluster.ctl("drain decode-0 --wait --timeout 0")
    assert result.exit_code == 1
    assert "is draining after" in result.stdout
    assert "not drained within 0 s" in result.stderr


def test_a_router_that_is_away_does_not_say_who_is_gone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, num_calls = ctl.admin.drain.get_status, 0

    async def get_status(admin: AdminConnection) -> router_pb2.GetStatusResponse:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 3:
            raise NoAnswer("it is being restarted")
        return await real(admin)

    monkeypatch.setattr(ctl.admin.drain, "_GONE_SECONDS", 0)
    monkeypatch.setattr(ctl.admin.drain, "get_status", get_status)
    done = status(worker(draining=True, num_open=0, drained=True))
    cluster.admin.replies["GetStatus"] = done
    assert cluster.json("drain decode-0 --wait")["state"] == "drained"
    assert num_calls == 3


def test_a_router_that_has_ended_is_not_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a whole release is deleted: its worker is only told to stop after this."""

    async def get_status(admin: AdminConnection) -> router_pb2.GetStatusResponse:
        raise NoAnswer("nothing is there")

    monkeypatch.setattr(ctl.admin.drain, "_SILENT_SECONDS", 0.3)
    monkeypatch.setattr(ctl.admin.drain, "get_status", get_status)
    result = cluster.ctl("drain decode-0 --wait --timeout 5")
    assert result.exit_code == 1
    assert result.stderr == "error: nothing is there; decode-0 may not be drained\n"


def test_nodes_of_a_group_are_drained_together(cluster: Cluster) -> None:
    other = ProcessIdentity(role=ROLE_DECODE, name="decode-1", address="10.0.0.2:7000", epoch="d-1")
    cluster.admin.replies["DrainWorker"] = router_pb2.DrainWorkerResponse(
        worker=DECODE, others=[other]
    )
    assert cluster.ctl("undrain decode-0").stdout.splitlines() == [
        "decode-0 (10.0.0.1:7000) is ready",
        "decode-1 (10.0.0.2:7000) is ready",
    ]
    first, second = (worker(draining=True, drained=True, num_open=0) for _ in range(2))
    second.identity.CopyFrom(other)
    late = worker(draining=True)
    late.identity.CopyFrom(other)
    replies = [status(first, late), status(first, late), status(first, second)]
    cluster.admin.replies["GetStatus"] = replies
    told = cluster.json("drain decode-0 --wait")
    assert (told["name"], told["state"]) == ("decode-0", "drained")
    assert [(one["name"], one["state"]) for one in told["others"]] == [("decode-1", "drained")]
    cluster.admin.replies["GetStatus"] = status(first, late)
    result = cluster.ctl("drain decode-0 --wait --timeout 0")
    assert result.exit_code == 1
    assert "decode-1 (10.0.0.2:7000) is draining after" in result.stdout


def test_log_levels(cluster: Cluster) -> None:
    told = router_pb2.ProcessLogLevel(identity=GATEWAY, previous="info")
    cluster.admin.replies["SetLogLevel"] = router_pb2.SetProcessLogLevelResponse(processes=[told])
    (row,) = cluster.json("logs-level debug gateway")
    assert (row["name"], row["before"], row["now"]) == ("gateway", "info", "debug")
    (request,) = cluster.admin.requests("SetLogLevel")
    assert (request.process, request.level) == ("gateway", "debug")
    silent = router_pb2.ProcessLogLevel(identity=DECODE, error="it does not answer")
    reply = router_pb2.SetProcessLogLevelResponse(processes=[told, silent])
    cluster.admin.replies["SetLogLevel"] = reply
    result = cluster.ctl("logs-level debug")
    assert result.exit_code == 1
    assert "not set: it does not answer" in result.stdout
    assert cluster.ctl("logs-level loud").exit_code == 2


def test_configs(cluster: Cluster) -> None:
    settings = {"ranks": 2, "fast": True, "peers": ["a:1", "b:2"], "run_dir": ""}
    told = router_pb2.ProcessConfig(
        identity=DECODE, config_json=json.dumps(settings), version="1.2"
    )
    cluster.admin.replies["GetConfig"] = router_pb2.GetProcessConfigResponse(processes=[told])
    (config,) = cluster.json("config decode-0")
    assert (config["settings"], config["version"]) == (settings, "1.2")
    lines = cluster.ctl("config").stdout.splitlines()
    assert lines[0] == "decode-0 (decode, 10.0.0.1:7000, version 1.2)"
    assert [line.split() for line in lines[2:]] == [
        ["ranks", "2"], ["fast", "true"], ["peers", "a:1,b:2"], ["run_dir", "-"],
    ]  # fmt: skip
    silent = router_pb2.ProcessConfig(identity=DECODE, error="it does not answer")
    cluster.admin.replies["GetConfig"] = router_pb2.GetProcessConfigResponse(processes=[silent])
    result = cluster.ctl("config")
    assert result.exit_code == 1
    assert "does not tell: it does not answer" in result.stdout


EXPLANATION = router_pb2.AdminExplainResponse(
    assignments=[
        router_pb2.AssignmentRecord(
            leg_id="chatcmpl-1-0",
            at=1000.0,
            queue_seconds=0.0123,
            num_prompt_tokens=130,
            num_matched_pages=2,
            outcome="ok",
            candidates=[
                router_pb2.Candidate(
                    worker=router_pb2.WorkerRef(name="prefill-0"),
                    role=ROLE_PREFILL,
                    chosen=True,
                    total=0.75,
                    parts=[router_pb2.ScorePart(scorer="load", score=0.75, weight=1)],
                ),
                router_pb2.Candidate(
                    worker=router_pb2.WorkerRef(name="decode-1"),
                    role=ROLE_DECODE,
                    rejected_by="has_room",
                ),
                router_pb2.Candidate(
                    worker=router_pb2.WorkerRef(name="decode-9"),
                    role=ROLE_DECODE,
                    rejected_by="paired",
                ),
            ],
        ),
        router_pb2.AssignmentRecord(leg_id="chatcmpl-1-0", outcome="UNAVAILABLE"),
    ],
    legs=[
        RequestLeg(
            worker=DECODE,
            leg_id="chatcmpl-1-0",
            accepted_at=1000.1,
            num_prompt_tokens=130,
            num_cached_tokens=128,
            num_output_tokens=7,
            kv_bytes=3 * 2**20,
            transfer_seconds=0.0042,
            num_steps=6,
            num_attempts=1,
            total_seconds=1.5,
            finish="stop",
            peer=WorkerRefText(name="prefill-0"),
        )
    ],
    unreachable=["prefill-0"],
)


def test_explanations(cluster: Cluster) -> None:
    cluster.admin.replies["ExplainRequest"] = EXPLANATION
    told = cluster.json("explain chatcmpl-1")
    assert cluster.admin.requests("ExplainRequest")[-1].request_id == "chatcmpl-1"
    assert told["assignments"][0]["candidates"][0]["parts"] == [
        {"scorer": "load", "score": 0.75, "weight": 1.0}
    ]
    (leg,) = told["legs"]
    assert (leg["worker"], leg["kv_bytes"], leg["finish"]) == ("decode-0", 3 * 2**20, "stop")
    assert told["unreachable"] == ["prefill-0"]
    text = cluster.ctl("explain chatcmpl-1").stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any("after 12.3 ms in line; 130 prompt tokens, 2 pages" in line for line in lines)
    assert "* prefill prefill-0 0.750 load 0.750 (weight 1)" in lines
    assert "decode decode-1 - left out by filter has_room" in lines
    why = "no worker of the other role is left that it can work with"
    assert f"decode decode-9 - left out by filter paired: {why}" in lines
    assert any("not assigned (UNAVAILABLE)" in line for line in lines)
    for line in ("KV moved 3.1 MB", "moving KV 4.2 ms", "decode steps 6", "finish stop"):
        assert line in lines
    assert "prefill-0 had a part in it and does not answer any more" in lines


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (NotFound("there is no process 'x'"), 1, "there is no process 'x'"),
        (InvalidRequest("2 processes are named 'x'"), 2, "2 processes"),
        (Unavailable("worker x is lost"), 1, "worker x is lost"),
        (Unauthenticated("an admin token is needed here"), 1, "EPSERVE_ADMIN_TOKEN"),
    ],
)
def test_refusals(cluster: Cluster, error: Exception, status: int, words: str) -> None:
    cluster.admin.replies["DrainWorker"] = error
    result = cluster.ctl("drain x")
    assert (result.exit_code, result.stdout) == (status, "")
    assert words in result.stderr


def test_the_token_comes_from_a_file_or_the_environment(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    for line, environment in (
        ("workers", {}),
        ("workers", {"EPSERVE_ADMIN_TOKEN": "from-environment"}),
        (f"workers --token-file {file}", {"EPSERVE_ADMIN_TOKEN": "from-environment"}),
    ):
        assert cluster.ctl(line, **environment).exit_code == 0
    sent = [token for _, _, token in cluster.admin.calls]
    assert sent == ["", "Bearer from-environment", "Bearer from-file"]
    assert cluster.ctl("workers --token-file /nowhere").exit_code == 2


def test_the_router_comes_from_the_environment(cluster: Cluster) -> None:
    result = RUNNER.invoke(app, ["workers"], env={"EPSERVE_ROUTER": cluster.address})
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", ["workers", "drain x", "explain x", "config", "status"])
def test_no_router_is_a_failure(command: str) -> None:
    result = RUNNER.invoke(app, [*command.split(), "--router", "127.0.0.1:1"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no answer from the router at 127.0.0.1:1" in result.stderr


def test_every_command_teaches_by_an_example() -> None:
    commands = [each.name or each.callback.__name__ for each in app.registered_commands]
    for name in commands:
        result = RUNNER.invoke(app, [name.replace("_", "-"), "--help"])
        assert result.exit_code == 0, name
        assert f"Example: ctl {name.replace('_', '-')}" in result.output


def test_names_are_completed(cluster: Cluster) -> None:
    completion = {
        "_CTL_COMPLETE": "complete_bash",
        "COMP_WORDS": f"ctl drain --router {cluster.address} dec",
        "COMP_CWORD": "4",
    }
    result = RUNNER.invoke(app, [], env=completion, prog_name="ctl")
    assert result.stdout.split() == ["decode-0"], result.output


def test_figures() -> None:
    durations = [format_duration(each) for each in (0, 0.000042, 0.0123, 0.25, 0.9996, 12.3456)]
    assert durations == ["0 ms", "0.042 ms", "12.3 ms", "250 ms", "1000 ms", "12.346 s"]
