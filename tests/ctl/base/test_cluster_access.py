"""Where `ctl` finds the token of a `ctl up`."""

import os
import stat
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ctl.base.cluster_access import ClusterAccess, find_token, make_token


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def run_folder(temporary: Path, name: str) -> str:
    folder = temporary / name
    folder.mkdir()
    return str(folder)


def test_it_is_found_by_the_routers_port(temporary: Path) -> None:
    made = make_token(run_folder(temporary, "epserve-a"), "127.0.0.1:8001")
    make_token(run_folder(temporary, "epserve-b"), "127.0.0.1:9001")
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert len(made.read_text().strip()) >= 32
    for router in ("127.0.0.1:8001", "localhost:8001", "[::1]:8001"):
        assert find_token(router) == made
    for router in ("127.0.0.1:8002", "10.0.0.1:8001", "router:8001"):
        assert find_token(router) is None


def test_the_youngest_counts(temporary: Path) -> None:
    """One that was killed leaves its folder behind."""
    made = [
        make_token(run_folder(temporary, f"epserve-{name}"), "127.0.0.1:8001") for name in "zab"
    ]
    for age, file in enumerate(reversed(made)):
        os.utime(file, ns=(0, 10**18 - age))
    assert find_token("127.0.0.1:8001") == made[-1]
    assert len({file.read_text() for file in made}) == 3


def test_another_users_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_token(run_folder(temporary, "epserve-a"), "127.0.0.1:8001")
    monkeypatch.setattr(os, "getuid", lambda: os.stat(temporary).st_uid + 1)
    assert find_token("127.0.0.1:8001") is None


def test_processes_are_told_what_is_given(tmp_path: Path) -> None:
    given = ClusterAccess(cluster_token_file=tmp_path, cluster_tls_ca=tmp_path / "ca")
    assert given.environment() == {
        "EPSERVE_CLUSTER_TOKEN_FILE": str(tmp_path),
        "EPSERVE_CLUSTER_TLS_CA": str(tmp_path / "ca"),
        "EPSERVE_CLUSTER_TLS_NAME": "epserve",
    }


def test_an_environment_tells_what_it_was_made_of() -> None:
    access = ClusterAccess(cluster_token_file=Path("/t"), cluster_tls_ca=Path("/c"))
    for given in (ClusterAccess(), access, replace(access, cluster_tls_name="x")):
        assert ClusterAccess.of_environment(given.environment() | {"HOME": "/"}) == given
