"""The script of `helm test` tells a gateway that works from one that does not."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.deploy.chart import CHART

KEY = "sk-right"


class Gateway(ThreadingHTTPServer):
    """Answers completions; `streamed` is the text of streams, `text` that of whole replies."""

    def __init__(self, *, text: str = "abc", streamed: str = "abc", ends: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.text, self.streamed, self.ends = text, streamed, ends
        self.num_busy = self.num_cut = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Gateway

    def do_POST(self) -> None:  # noqa: N802 - the name is the base's
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers.get("authorization") != f"Bearer {KEY}":
            return self._send(401, b"{}")
        if body["model"] != "demo":
            return self._send(404, b"{}")
        if self.server.num_busy:
            self.server.num_busy -= 1
            return self._send(503, b"{}")
        if self.server.num_cut:
            self.server.num_cut -= 1
            return self._send(200, b"2\r\n{", framing=("transfer-encoding", "chunked"))
        if not body.get("stream"):
            return self._send(200, _choice(self.server.text))
        events = [_choice(letter) for letter in self.server.streamed] + [b'{"choices": []}']
        events += [b"[DONE]"] if self.server.ends else []
        return self._send(200, b"".join(b"data: " + event + b"\n\n" for event in events))

    def _send(self, status: int, content: bytes, framing: tuple[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header(*(framing or ("content-length", str(len(content)))))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def _choice(text: str) -> bytes:
    return json.dumps({"choices": [{"text": text}]}).encode()


@contextmanager
def serving(**behaviour: Any) -> Iterator[Gateway]:
    with Gateway(**behaviour) as gateway:
        Thread(target=gateway.serve_forever, daemon=True).start()
        yield gateway
        gateway.shutdown()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "api-keys"
    hashed = f"sha256:{sha256(b'sk-hashed').hexdigest()}"
    path.write_text(f"# keys\n  # of ours\n\n{hashed} name=hashed\n{KEY} name=first\nsk-other\n")
    return path


def smoke_test(url: str, *args: str, seconds: float = 0.0) -> tuple[int, str]:
    script = CHART / "files" / "smoke_test.py"
    done = subprocess.run(
        [sys.executable, script, url, f"--timeout-seconds={seconds}", *args],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_passes_after_waiting_for_workers(keys: Path) -> None:
    with serving() as gateway:
        gateway.num_busy = 1
        args = ("--model=demo", f"--api-keys-file={keys}")
        status, said = smoke_test(gateway.url, *args, seconds=60)
    assert (status, said) == (0, "demo says 'abc'\nnot yet: HTTP Error 503: Service Unavailable\n")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"streamed": "abd"}, "streamed 'abd', but the whole reply is 'abc'"),
        ({"ends": False}, "the stream did not end with [DONE]"),
    ],
)
def test_fails_for_wrong_replies(keys: Path, behaviour: dict[str, Any], reason: str) -> None:
    with serving(**behaviour) as gateway:
        status, said = smoke_test(gateway.url, "--model=demo", f"--api-keys-file={keys}")
    assert status == 1
    assert f"failed: {reason}" in said


def test_what_waiting_does_not_mend_fails_at_once(keys: Path) -> None:
    with serving() as gateway:
        status, said = smoke_test(gateway.url, "--model=demo", seconds=600)
        assert (status, said) == (1, "failed: HTTP Error 401: Unauthorized\n")
        args = ("--model=other", f"--api-keys-file={keys}")
        assert smoke_test(gateway.url, *args, seconds=600)[0] == 1


def test_a_reply_that_is_cut_off_is_asked_for_again(keys: Path) -> None:
    with serving() as gateway:
        gateway.num_cut = 1
        args = ("--model=demo", f"--api-keys-file={keys}")
        status, said = smoke_test(gateway.url, *args, seconds=60)
    assert status == 0
    assert "not yet: IncompleteRead" in said


def test_only_hashes_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "api-keys"
    path.write_text(f"sha256:{sha256(KEY.encode()).hexdigest()}\n")
    status, said = smoke_test("http://127.0.0.1:1", "--model=demo", f"--api-keys-file={path}")
    assert (status, said) == (1, f"failed: {path} has no key to ask with: a hash lets nobody in\n")


def test_nobody_there() -> None:
    status, said = smoke_test("http://127.0.0.1:1", "--model=demo")
    assert status == 1
    assert "refused" in said
