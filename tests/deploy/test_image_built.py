"""The real Dockerfile, built by deploy/build_local, and containers of it, by the page of it.

Needs root, buildah, debootstrap and podman; no Docker, no registry of images.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.chart import ROOT
from tests.eventually import eventually

CUDA_BYTES = 40 << 30  # while it is built
PAGE = (ROOT / "deploy" / "README.md").read_text()
LACKING = [tool for tool in ("buildah", "debootstrap", "podman") if not shutil.which(tool)]
OF_PIP = ("index-url", "extra-index-url", "find-links", "cert", "constraint", "trusted-host")
# Standard library alone, as the image has no client.
ASK = """
import json, urllib.request as http
url = "http://127.0.0.1:8000/v1"
model = json.load(http.urlopen(f"{url}/models"))["data"][0]["id"]
body = {"model": model, "messages": [{"role": "user", "content": "What is 512 - 9?"}]}
request = http.Request(f"{url}/chat/completions", json.dumps(body).encode())
request.add_header("Content-Type", "application/json")
print(json.load(http.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
"""
# What is compiled when a GPU asks for it: headers of DeepGEMM by nvcc, Triton's launcher by gcc.
COMPILE = """
import subprocess, sysconfig
from importlib.util import find_spec
from pathlib import Path
import flash_mla, torch, triton
from core.cuda_home import cuda_home
from kernels.build import cuda_build

def folder(package):
    return Path(find_spec(package).origin).parent

def compile(*command):
    subprocess.run(list(map(str, command)), check=True)

Path("/tmp/k.cu").write_text("#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>")
compile(cuda_home() / "bin/nvcc", "--cubin", "-std=c++20", "--expt-relaxed-constexpr",
        "-gencode=arch=compute_90a,code=sm_90a", "-I", folder("deep_gemm") / "include",
        "-o", "/tmp/k.cubin", "/tmp/k.cu")
triton = folder("triton") / "backends/nvidia"
compile("gcc", "-c", "-fPIC", "-I", triton / "include", "-o", "/tmp/driver.o",
        "-I", sysconfig.get_paths(scheme="posix_prefix")["include"], triton / "driver.c")
print([cuda_build.build(source).parent.as_posix() for source in cuda_build.sources()])
print(torch.__version__, torch.version.cuda, torch.cuda.nccl.version())
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="left out: debootstrap and buildah want root"),
    pytest.mark.skipif(bool(LACKING), reason=f"left out: {', '.join(LACKING)} not installed"),
]


def as_pip_here() -> list[str]:
    """Options with which pip in the build reads the packages that pip reads here."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    options, volumes = [], []
    for key, values in re.findall(r"^[^=]*\.([a-z-]+)='(.*)'$", listing, re.MULTILINE):
        for value in values.split() if key in OF_PIP else ():
            options.append(f"--{key}={value}")
            if (path := Path(urllib.parse.urlsplit(value).path)).is_absolute() and path.exists():
                # Simple indexes refer to files beside them.
                folder = path.parent if path.name == "simple" else path
                volumes += ["--volume", f"{folder}:{folder}:ro"]
    return [*volumes, "--build-arg", f"PIP_ARGS={' '.join(dict.fromkeys(options))}"]


@contextmanager
def built(variant: str) -> Iterator[str]:
    name = f"localhost/epserve:test-of-{variant}"
    subprocess.run([ROOT / "deploy/build_local", variant, name, *as_pip_here()], check=True)
    yield name
    subprocess.run(["podman", "rmi", "--force", name], check=True)


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    with built("cpu") as name:
        yield name


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that any machine may give; of cgroups, crun takes but one version at a time."""
    engine = '[engine]\nruntime = "runc"\n' if shutil.which("runc") else ""
    (tmp_path / "containers.conf").write_text(
        f'[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n{engine}'
    )
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def network(image: str, podman: None) -> Iterator[str]:
    """A container whose loopback the others have as theirs, and that takes them along."""
    command = ("podman", "run", "--detach", "--net=none", "--no-healthcheck", "--entrypoint=sleep")
    started = run(*command, image, "infinity")
    assert started.returncode == 0, started.stderr
    name = started.stdout.strip()
    yield name
    run("podman", "rm", "--force", "--depend", "--time=1", name)


def documented(image: str, network: str) -> list[list[str]]:
    """The page's commands for one cluster by hand, for podman, with a root that cannot be written.
    Its health checks would be run by systemd."""
    (block,) = [b for b in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) if "run -d" in b]
    assert block.count("--read-only ") == block.count("--net=host ") == len(block.splitlines()) == 5
    text = block.replace("--net=host", f"--no-healthcheck --net=container:{network}")
    text = text.replace("docker", "podman")
    return [shlex.split(re.sub(r"epserve:[0-9.]+", image, line)) for line in text.splitlines()]


async def test_the_cluster_of_the_page_answers_a_chat(image: str, network: str) -> None:
    *roles, status = documented(image, network)
    assert [command[command.index(image) + 1] for command in roles] == [
        "prefill", "decode", "router", "gateway",
    ]  # fmt: skip
    started = [run(*command) for command in roles]
    assert [each.returncode for each in started] == [0] * 4, started
    containers = [each.stdout.strip() for each in started]
    for name in containers:
        check = ("podman", "exec", name, "healthcheck")
        await eventually(lambda check=check: run(*check).returncode == 0, 300)
    ask = ("podman", "exec", containers[-1], "python", "-c", ASK)
    answer = await eventually(lambda: run(*ask).stdout, 300)
    assert answer.endswith("The answer is 503.\n")
    shown = run(*status)
    assert shown.returncode == 0, shown.stderr
    assert all(role in shown.stdout for role in ("gateway", "router", "prefill", "decode"))
    for name in containers:
        assert run("podman", "exec", name, "id", "-u").stdout == "10001\n"
        assert run("podman", "exec", name, "touch", "/opt/epserve/x").returncode == 1
        assert run("podman", "exec", name, "touch", "/var/cache/epserve/x").returncode == 0


def test_doctor_finds_what_a_container_needs(image: str, podman: None) -> None:
    command = ("podman", "run", "--rm", "--read-only", "--no-healthcheck", "--net=none", image)
    done = run(*command, "ctl", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^NIXL +ok ", done.stdout, re.MULTILINE)


@pytest.mark.skipif(shutil.disk_usage("/var").free < CUDA_BYTES, reason="left out: too little disk")
def test_the_cuda_variant_compiles_what_a_gpu_asks_for(podman: None) -> None:
    with built("cuda") as image:
        command = ("podman", "run", "--rm", "--read-only", "--no-healthcheck", "--net=none")
        done = run(*command, "--entrypoint=python", image, "-c", COMPILE)
        assert done.returncode == 0, done.stderr
        folders, versions = done.stdout.splitlines()
        assert set(ast.literal_eval(folders)) == {"/opt/epserve/cache"}
        assert versions.split()[1:] == ["13.0", "(2,", "30,", "7)"]
