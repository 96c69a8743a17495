"""The wheel in an environment of its own, away from the checkout: what docs/install.md calls."""

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cluster.harness import wait_until
from tests.deploy.wheel import ROOT
from tests.free_ports import free_port

PAGE = ROOT / "docs" / "install.md"


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as the page says; but other packages are those of this environment, to which a .pth file
    leads: the link to the checkout there is none of them."""
    folder = tmp_path_factory.mktemp("venv").resolve()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    subprocess.run(
        [
            sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet",
            "--no-index", "--no-deps", "--ignore-installed", wheel,
        ],
        check=True,
    )  # fmt: skip
    return folder


def outside(environment: Path) -> dict[str, str]:
    """A shell's variables with the environment first on its path, and nothing of a checkout."""
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return others | {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}


def commands(*, of_cuda: bool) -> list[str]:
    """All lines of the page's shell blocks but those that make the environment."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    called = [line.split(" # ")[0].strip() for line in lines if line and not line.startswith("#")]
    mine = [line for line in called if not re.match(r"(pip|apt|python3.12|\.) ", line)]
    return [line for line in mine if ("cuda" in line) == of_cuda]


@contextmanager
def running(command: str, environment: Path, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (cwd / "terminal.txt").open("wb") as terminal:
        process = subprocess.Popen(
            command.split(), cwd=cwd, env=outside(environment), stdout=terminal, stderr=terminal
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            finally:
                process.kill()


def is_healthy(process: subprocess.Popen[bytes], url: str) -> bool:
    assert process.poll() is None, "ctl up has ended"
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def test_ctl_up_answers(environment: Path, tmp_path: Path) -> None:
    port = free_port(8)
    (command,) = [each for each in commands(of_cuda=False) if each.startswith("ctl up")]
    url = f"http://127.0.0.1:{port}"
    with running(f"{command} --port {port} --decode-ranks 1", environment, tmp_path) as process:
        wait_until(lambda: is_healthy(process, url), 240, "a cluster of the installed wheel")
        (curl,) = [each for each in commands(of_cuda=False) if each.startswith("curl")]
        answer = subprocess.check_output(
            ["bash", "-c", curl.replace("http://127.0.0.1:8000", url)], text=True
        )
    assert json.loads(answer)["choices"][0]["message"]["content"].strip() == "The answer is 85."
    logs = "".join(path.read_text() for path in (tmp_path / "logs").glob("*.log"))
    assert str(ROOT) not in logs


def test_every_other_command_of_the_page_ends_well(environment: Path, tmp_path: Path) -> None:
    others = [each for each in commands(of_cuda=False) if not each.startswith(("ctl up", "curl"))]
    assert len(others) >= 2
    for command in others:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=outside(environment),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        if command.startswith("ctl doctor"):
            assert f"of ours in {environment}/lib/python" in done.stdout
    assert commands(of_cuda=True) != []
