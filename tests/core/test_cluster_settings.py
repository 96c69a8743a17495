"""Who may be asked by others than this machine's processes says so, or has a token."""

from pathlib import Path

import pytest

from core.address import is_loopback
from core.settings import PeerSettings, ProcessSettings


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True), ("127.9.8.7", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("fd00::1", False),
        ("example.com", False), ("127.0.0.1.example.com", False),
    ],
)  # fmt: skip
def test_is_loopback(host: str, *, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("listen", ["0.0.0.0:8001", "[::]:0", "10.0.0.1:1", "router:8001"])
def test_a_server_beyond_this_machine_needs_a_guard(
    listen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        PeerSettings.parse([f"--listen={listen}"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --listen {listen}: beyond this machine give")
    assert "--cluster-token-file" in said
    assert "--insecure-cluster" in said
    file = tmp_path / "token"
    file.write_text("sesame")
    for guard in (f"--cluster-token-file={file}", f"--cluster-tls-ca={file}", "--insecure-cluster"):
        assert PeerSettings.parse([f"--listen={listen}", guard]).listen == listen


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_on_this_machine_alone_it_needs_none(listen: str) -> None:
    assert PeerSettings.parse([f"--listen={listen}"]).listen == listen


def test_who_is_called_by_clients_alone_has_no_such_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ProcessSettings.parse(["--listen=0.0.0.0:1"]).listen == "0.0.0.0:1"
    with pytest.raises(SystemExit):
        ProcessSettings.parse(["--insecure-cluster"])
    assert "insecure-cluster" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "two words", "one\n\ntwo", "\x1b"])
def test_a_token_file_without_words_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(SystemExit):
        PeerSettings.parse([f"--cluster-token-file={file}"])
    assert "--cluster-token-file" in capsys.readouterr().err


def test_names_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ProcessSettings.parse(["--name=decode\x1b[2J"])
    said = capsys.readouterr().err
    assert "--name" in said
    assert "\x1b" not in said
