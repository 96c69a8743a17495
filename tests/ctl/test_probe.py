"""`ctl probe` against real servers."""

import http.server
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from ctl.main import app
from proto.router_pb2 import GetStatusResponse, RejectedWorker
from proto.worker_pb2 import ROLE_DECODE, ProcessIdentity, WorkerStatus
from tests.ctl.admin.admin_server import ScriptedAdmin, admin_server

RUNNER = CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})


@pytest.fixture
def grpc_address() -> Iterator[str]:
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    servicer.set("liveness", health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # noqa: N802 - the name is the base class's
        self.send_response({"/ready": 200, "/version": 401}.get(self.path, 503))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def http_address() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_grpc(grpc_address: str) -> None:
    result = RUNNER.invoke(app, ["probe", "grpc", grpc_address])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "NOT_SERVING" in result.stderr
    result = RUNNER.invoke(app, ["probe", "grpc", grpc_address, "--service", "liveness"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "healthy\n", "")
    result = RUNNER.invoke(app, ["probe", "grpc", grpc_address, "--service", "other"])
    assert result.exit_code == 1
    assert "NOT_FOUND" in result.stderr


def test_http(http_address: str) -> None:
    result = RUNNER.invoke(app, ["probe", "http", http_address])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "GET /health says 503" in result.stderr
    assert RUNNER.invoke(app, ["probe", "http", http_address, "--path", "/ready"]).exit_code == 0
    guarded = ["probe", "http", http_address, "--path", "/version"]
    assert RUNNER.invoke(app, guarded).exit_code == 1
    assert RUNNER.invoke(app, [*guarded, "--alive"]).exit_code == 0
    assert RUNNER.invoke(app, ["probe", "http", http_address, "--alive"]).exit_code == 1
    result = RUNNER.invoke(app, ["probe", "http", http_address, "--tls"])
    assert result.exit_code == 1


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_nothing_listens_there(protocol: str) -> None:
    result = RUNNER.invoke(app, ["probe", protocol, "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "not healthy" in result.stderr
    assert RUNNER.invoke(app, ["probe", protocol, "nowhere"]).exit_code == 2


def test_pair() -> None:
    """Healthy once the router says so; until then, why not."""
    me = ProcessIdentity(role=ROLE_DECODE, name="decode-0", epoch="d-0")
    ready = WorkerStatus(identity=me, ready=True)
    misfit = RejectedWorker(identity=me, reason="another pairing version")
    steps = (
        (GetStatusResponse(), "the router knows no such worker"),
        (GetStatusResponse(workers=[WorkerStatus(identity=me)]), "it is starting"),
        (GetStatusResponse(workers=[ready]), "no worker of the other role is ready"),
        (GetStatusResponse(workers=[ready], rejected=[misfit]), "another pairing version"),
    )
    admin = ScriptedAdmin(
        GetStatus=[
            *(reply for reply, _ in steps),
            GetStatusResponse(workers=[ready], paired_epochs=["d-0"]),
        ]
    )
    with admin_server(admin) as address:
        command = ["probe", "pair", "decode-0", "--router", address]
        for _, reason in steps:
            result = RUNNER.invoke(app, command)
            assert (result.exit_code, result.stdout) == (1, "")
            assert result.stderr == f"not healthy: {reason}\n"
        result = RUNNER.invoke(app, command)
        assert (result.exit_code, result.stdout) == (0, "healthy\n")
    assert RUNNER.invoke(app, command).exit_code == 1, "no router answers"
