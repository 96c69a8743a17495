"""`ctl bench` against what is no server, or none for it."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ctl.main import app

# What a gRPC server sends first: SETTINGS of HTTP/2.
SETTINGS = bytes((0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 5, 0, 0, 64, 0))
UNAUTHORIZED = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"
NO_JSON = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--num-prompts", "1", *arguments])


@pytest.fixture
def url_of() -> Callable[[bytes], str]:
    """Serves one connection with the given bytes."""

    def serve(reply: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))

        def answer() -> None:
            with listener, listener.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    return serve


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (UNAUTHORIZED, "answers 401 Unauthorized; --api-key gives a key"),
        (SETTINGS, "no answer from http://127.0.0.1:"),
        (b"", "no answer from http://127.0.0.1:"),
    ],
)
def test_not_served(url_of: Callable[[bytes], str], reply: bytes, problem: str) -> None:
    result = bench("--url", url_of(reply))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert problem in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_no_model(url_of: Callable[[bytes], str]) -> None:
    result = bench("--url", url_of(NO_JSON))
    assert result.exit_code == 2
    assert "names no model" in result.stderr


def test_records_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    records = tmp_path / "file" / "records.jsonl"
    result = bench("--model", "m", "--url", "http://127.0.0.1:1", "--json", str(records))
    assert result.exit_code == 1
    assert f"error: no records in {records}" in result.stderr
    assert "1 requests, 1 errors" in result.stdout


def test_no_request_succeeds() -> None:
    """Why not; there are no figures to show."""
    result = bench("--model", "m", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stdout.startswith("1 requests, 1 errors, ")
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr.startswith("1 x ")
