"""`ctl doctor` beside a cluster, which says what the test wants."""

import socket
from pathlib import Path

import pytest

from core.errors import Unavailable
from ctl.base.cluster_access import RUN_FOLDER_PREFIX, make_token
from ctl.doctor.cluster_checks import check_cluster
from proto import router_pb2, worker_pb2
from tests.ctl.admin.admin_server import ScriptedAdmin, admin_server

PORT = 8000


def status(*quiet_seconds: float) -> router_pb2.GetStatusResponse:
    ranks = [
        worker_pb2.RankStatus(rank=rank, pid=50 + rank, quiet_seconds=seconds)
        for rank, seconds in enumerate(quiet_seconds)
    ]
    identity = worker_pb2.ProcessIdentity(name="decode-0")
    worker = worker_pb2.WorkerStatus(identity=identity, ranks=ranks)
    return router_pb2.GetStatusResponse(workers=[worker])


def test_nothing_is_stuck() -> None:
    with admin_server(ScriptedAdmin(GetStatus=status(0.2, 1.1))) as router:
        (finding,) = check_cluster(router, PORT)
    assert (finding.state, finding.advice) == ("ok", "")


def test_what_is_stuck_is_named_with_its_time() -> None:
    with admin_server(ScriptedAdmin(GetStatus=status(0.2, 61.0))) as router:
        (finding,) = check_cluster(router, PORT)
    assert finding.state == "warning"
    assert finding.detail.startswith("decode-0 rank 1 (pid 51) for 1m 1s: ")
    assert "kill -URG 51" in finding.advice


def test_a_router_that_refuses() -> None:
    with admin_server(ScriptedAdmin(GetStatus=Unavailable("not now"))) as router:
        (finding,) = check_cluster(router, PORT)
    assert (finding.state, finding.detail) == ("warning", "not now")


def test_the_cluster_of_a_ctl_up_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1] - 1
    assert [*check_cluster("", port)] == []
    folder = tmp_path / f"{RUN_FOLDER_PREFIX}x"
    folder.mkdir()
    make_token(str(folder), f"127.0.0.1:{port + 1}")
    (finding,) = check_cluster("", port)
    assert (finding.check, finding.state) == ("cluster", "warning")
    assert "no answer from the router" in finding.detail
