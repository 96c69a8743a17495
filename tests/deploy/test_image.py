"""The image, without building it: its Dockerfile is linted, its scripts are run for real."""

import os
import re
import runpy
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.chart import ROOT
from tests.free_ports import free_port

DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
VARIANTS = runpy.run_path(str(ROOT / "scripts" / "pin_dependencies.py"))["VARIANTS"]
MODEL = ROOT / "demo_model" / "checkpoint"


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_dockerfile_passes_its_linter() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("left out: hadolint is not installed")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_shell_scripts_are_valid() -> None:
    for path in (DEPLOY / "bin").iterdir():
        if path.read_text().startswith("#!/bin/sh"):
            assert os.access(path, os.X_OK), path
            subprocess.run(["sh", "-n", path], check=True)


@pytest.mark.parametrize("constraints", VARIANTS)
def test_each_variant_installs_its_extras_by_its_constraints(
    constraints: str, tmp_path: Path
) -> None:
    folded = DOCKERFILE.read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^RUN (.*requirements\.txt.*)$", folded, re.MULTILINE)
    variant = "cuda" if "cuda" in constraints else "cpu"
    (tmp_path / "deploy").mkdir()
    done = subprocess.run(
        ["sh", "-euc", f'python() {{ echo "$@"; }}; pip() {{ echo "$@"; }}; {command}'],
        env={"VARIANT": variant, "PIP_ARGS": "--pre"}, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    asked = (tmp_path / "requirements.txt").read_text().split()
    assert asked == ["deploy/requirements", *VARIANTS[constraints]]
    told = f"install --pre --constraint deploy/{constraints} --requirement requirements.txt"
    assert done.stdout.strip() == told


def test_the_image_holds_what_setup_needs_and_no_more() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    find = project()["tool"]["setuptools"]["packages"]["find"]  # type: ignore[index]
    packages = {name for name in find["include"] if "." not in name}
    assert packages == {name for name in kept if (ROOT / name / "__init__.py").exists()}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= kept
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    for source in " ".join(copied).split():
        assert source == "." or any(source.startswith(each) for each in kept), source


def test_it_runs_as_nobody_special() -> None:
    lines = DOCKERFILE.read_text().splitlines()
    last_stage = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert "USER 10001:10001" in last_stage
    assert any(line.startswith("HEALTHCHECK ") for line in last_stage)
    assert 'ENTRYPOINT ["epserve"]' in last_stage


@contextmanager
def container(*args: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process started by the image's entry point, with the image's PATH."""
    path = f"{DEPLOY / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["epserve", *args],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        executable=DEPLOY / "bin" / "epserve",
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def is_healthy(process: subprocess.Popen[str]) -> bool:
    """What the image's health check says of the process."""
    path = f"{DEPLOY / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [DEPLOY / "bin" / "healthcheck"],
        env=os.environ | {"PATH": path, "MAIN_PID": str(process.pid), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


def becomes_healthy(process: subprocess.Popen[str]) -> bool:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr and process.stderr.read()
        if is_healthy(process):
            return True
        time.sleep(0.2)
    return False


def test_health_of_a_router_from_start_to_end() -> None:
    listen = f"0.0.0.0:{free_port()}"
    with container("router", "--listen", listen, "--insecure-cluster") as process:
        assert becomes_healthy(process)
    assert not is_healthy_when_gone(listen)


def is_healthy_when_gone(listen: str) -> bool:
    """The check of a process that has the arguments of a router, but listens to nobody."""
    args = ("-c", "import time; time.sleep(60)", "-m", "router", f"--listen={listen}")
    with subprocess.Popen([sys.executable, *args], text=True) as process:
        try:
            return is_healthy(process)
        finally:
            process.kill()


@pytest.mark.parametrize("guard", [(), ("--api-keys=secret", "--guard-all-paths")])
def test_health_of_a_gateway_without_a_cluster(guard: tuple[str, ...]) -> None:
    """It lives, though it takes no requests, or none without a key."""
    port = free_port()
    args = ("--router=127.0.0.1:1", f"--model={MODEL}", *guard)
    with container("gateway", *args, EPSERVE_LISTEN=f"127.0.0.1:{port}") as process:
        assert becomes_healthy(process)


def test_ctl_and_wrong_roles() -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    entry = DEPLOY / "bin" / "epserve"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    run = {"capture_output": True, "text": True, "check": False, "env": environment}
    done = subprocess.run([entry, "ctl", "--help"], **run)  # type: ignore[call-overload]
    assert done.returncode == 0
    assert "status" in done.stdout
    done = subprocess.run([entry, "master"], **run)  # type: ignore[call-overload]
    assert done.returncode == 2
    assert done.stderr.startswith("usage: epserve gateway|router|prefill|decode|ctl")


def test_the_demo_model_is_that_of_the_installed_package(tmp_path: Path) -> None:
    """The folder that the image is built in, which the runtime has not, holds one as well."""
    for folder in ("source", "installed"):
        (tmp_path / folder / "demo_model").mkdir(parents=True)
        (tmp_path / folder / "demo_model/__init__.py").touch()
    (asked,) = re.findall(r"ln -s \"\$\((python .*)\)/checkpoint\"", DOCKERFILE.read_text())
    done = subprocess.run(
        ["bash", "-c", asked], cwd=tmp_path / "source", text=True, stdout=subprocess.PIPE,
        check=True, env={
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(tmp_path / "installed"),
        },
    )  # fmt: skip
    assert done.stdout.strip() == str(tmp_path / "installed/demo_model")
