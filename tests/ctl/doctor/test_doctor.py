"""`ctl doctor` on machines of all kinds, and on this one."""

import json
import os
import resource
import socket
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ctl.base.host import Host
from ctl.doctor import host_checks
from ctl.doctor.device_checks import check_gpus, check_nvlink, check_rdma, count_devices
from ctl.doctor.doctor import check_model
from ctl.doctor.finding import Finding
from ctl.doctor.package_checks import (
    check_fast_paths,
    check_gpu_set,
    check_nixl,
    check_python,
    check_torch,
)
from ctl.doctor.toolchain_checks import check_caches, check_compilers, check_nvcc
from ctl.main import app

ROOT = Path(__file__).resolve().parents[3]
CACHES = ("EPSERVE_CACHE", "TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR")
RUNNER = CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})
H200 = "{}, NVIDIA H200, 143771 MiB, 9.0, 580.65"
# As nvidia-smi topo -m prints it, cut.
LINKED = "        GPU0    GPU1\nGPU0     X      NV18\nGPU1    NV18     X\n"
UNLINKED = "        GPU0    GPU1\nGPU0     X      PHB\nGPU1    PHB      X\n"


class OtherHost(Host):
    """A machine by description: output of commands, files, folders, versions."""

    def __init__(
        self,
        *,
        gpus: tuple[str, ...] = (),
        topology: str = "",
        files: dict[str, str] | None = None,
        versions: dict[str, str] | None = None,
        python: tuple[bool, str] = (True, "UCX"),
        programs: dict[str, str] | None = None,
    ) -> None:
        self.gpus, self.topology, self.python = gpus, topology, python
        self.files, self.versions = files or {}, versions or {}
        self.programs = programs or {}  # what they print, by path

    def run(self, *command: str) -> str:
        if command[0] in self.programs:
            return self.programs[command[0]]
        if not self.gpus:
            return ""
        return self.topology if "topo" in command else "\n".join(self.gpus)

    def run_python(self, program: str) -> tuple[bool, str]:
        return self.python

    def read(self, path: str) -> str:
        return self.files.get(path, "")

    def names(self, folder: str) -> list[str]:
        below = (path.removeprefix(f"{folder}/") for path in self.files if path.startswith(folder))
        return sorted({path.split("/")[0] for path in below})

    def version(self, distribution: str) -> str:
        return self.versions.get(distribution, "")

    def requirements(self, distribution: str) -> list[str]:
        """Of the tree at hand, as its wheel says them."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        gpu = project["optional-dependencies"]["gpu"]
        return [*project["dependencies"], *(f'{text}; extra == "gpu"' for text in gpu)]

    def which(self, program: str) -> str:
        return next((path for path in self.programs if path.endswith(f"/{program}")), "")


def states(findings: Iterable[Finding]) -> list[str]:
    return [finding.state for finding in findings]


def test_gpus() -> None:
    none = OtherHost()
    assert count_devices(none) == 0
    assert states(check_gpus(none, needed=False)) == ["note"]
    assert states(check_gpus(none, needed=True)) == ["missing"]
    two = OtherHost(gpus=(H200.format(0), H200.format(1)))
    finding, driver = check_gpus(two, needed=True)
    assert (finding.detail, driver.detail) == ("2 x NVIDIA H200, 143771 MiB", "580.65")
    old = OtherHost(gpus=("0, NVIDIA A100, 81920 MiB, 8.0, 580.65",))
    assert states(check_gpus(old, needed=True)) == ["ok", "ok", "warning"]
    behind = OtherHost(gpus=("0, NVIDIA H200, 143771 MiB, 9.0, 575.57",))
    gpu, driver = check_gpus(behind, needed=True)
    assert (driver.state, driver.detail) == ("missing", "575.57")
    assert "needs 580 or newer" in driver.advice


def test_nvlink() -> None:
    two = (H200.format(0), H200.format(1))
    assert check_nvlink(OtherHost(gpus=two, topology=LINKED)).state == "ok"
    finding = check_nvlink(OtherHost(gpus=two, topology=UNLINKED))
    assert (finding.state, finding.detail) == ("warning", "0 of 2 GPUs are linked")
    assert check_nvlink(OtherHost(gpus=two[:1], topology=LINKED)).state == "note"


def test_rdma() -> None:
    assert states(check_rdma(OtherHost(), wanted=False)) == ["note"]
    assert states(check_rdma(OtherHost(), wanted=True)) == ["warning"]
    port = "/sys/class/infiniband/mlx5_0/ports/1/state"
    down = OtherHost(files={port: "1: DOWN"})
    assert states(check_rdma(down, wanted=True)) == ["warning"]
    files = {port: "4: ACTIVE", "/dev/infiniband/uverbs0": "", "/proc/modules": "nvidia_peermem 1"}
    (finding,) = check_rdma(OtherHost(files=files), wanted=True)
    assert finding.detail == "active: mlx5_0/1"
    bare = OtherHost(files={port: "4: ACTIVE"})
    assert [finding.check for finding in check_rdma(bare, wanted=True)] == [
        "RDMA",
        "RDMA device files",
        "GPUDirect RDMA",
    ]


def test_torch() -> None:
    def state(version: str, *, cuda: bool, **facts: object) -> str:
        told = json.dumps({"cuda": "13.0", "devices": 8, "nccl": True} | facts)
        host = OtherHost(versions={"torch": version}, python=(True, told))
        finding = check_torch(host, cuda=cuda)
        return finding.state

    assert state("", cuda=False) == "missing"
    assert state("2.13.0+cpu", cuda=False, cuda_=None, devices=0) == "ok"
    assert state("2.13.0", cuda=True) == "ok"
    assert state("2.15.0", cuda=True) == state("2.9.1", cuda=True) == "warning"
    assert state("2.13.0+cpu", cuda=True, devices=0) == "missing"
    assert state("2.13.0", cuda=True, nccl=False) == "warning"
    assert state("2.14.1+cu130", cuda=True) == "ok"
    told = check_torch(OtherHost(), cuda=False).advice
    assert told == "pip install 'torch<2.15,>=2.11'."
    broken = OtherHost(versions={"torch": "2.13.0"}, python=(False, "ImportError: libc10"))
    finding = check_torch(broken, cuda=False)
    assert finding.state == "missing"
    assert "libc10" in finding.detail


def test_other_packages() -> None:
    assert check_python((3, 11)).state == check_python((3, 12)).state == "ok"
    assert check_python((3, 13)).state == "missing"
    assert check_nixl(OtherHost()).state == "missing"
    installed = {"nixl": "1.5.1", "deep_gemm": "2.1"}
    assert check_nixl(OtherHost(versions=installed)).state == "ok"
    broken = OtherHost(versions=installed, python=(False, "no UCX plugin"))
    assert check_nixl(broken).state == "missing"
    host = OtherHost(versions=installed)
    assert states(check_fast_paths(host, cuda=True)) == ["warning", "ok", "warning"]
    assert states(check_fast_paths(host, cuda=False)) == ["note", "ok", "note"]
    (unfit,) = [f for f in check_fast_paths(broken, cuda=True) if f.state == "missing"]
    assert (unfit.check, unfit.detail) == ("DeepGEMM", "2.1 cannot be imported: no UCX plugin")
    host = OtherHost(versions={"sgl-deep-gemm": "0.1.4"})
    _, deep_gemm, flash_mla = check_fast_paths(host, cuda=True)
    assert (deep_gemm.state, deep_gemm.detail) == ("ok", "0.1.4")
    assert "without it our own kernels compute" in flash_mla.advice


SET = {
    "cuda-toolkit": "13.0.3.0", "nixl-cu13": "1.5.1", "nvidia-nccl-cu13": "2.30.7",
    "nvidia-nvshmem-cu13": "3.4.5", "sgl-deep-ep": "0.1.2.post1", "sgl-deep-gemm": "0.2.5",
    "sgl-flash-mla": "1.0.0", "torch": "2.14.1+cu130", "triton": "3.8.0",
}  # fmt: skip


def test_versions_of_the_gpu_set_fit_each_other() -> None:
    finding = check_gpu_set(OtherHost(versions=SET), cuda=True)
    assert (finding.state, finding.detail[:14]) == ("ok", "all 9 packages")
    other = {**SET, "torch": "2.13.0"}
    del other["sgl-deep-ep"]
    finding = check_gpu_set(OtherHost(versions=other), cuda=True)
    assert finding.state == "warning"
    assert finding.detail == "sgl-deep-ep missing (not 0.1.2.post1), torch 2.13.0 (not 2.14.1)"
    assert "pip install 'epserve[gpu]'" in finding.advice
    assert check_gpu_set(OtherHost(versions=other), cuda=False).state == "note"


def test_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    header = f"{sysconfig.get_paths()['include']}/Python.h"
    assert states(check_compilers(OtherHost())) == ["missing", "missing"]
    both = OtherHost(programs={"/usr/bin/clang": ""}, files={header: ""})
    assert states(check_compilers(both)) == ["ok", "ok"]
    monkeypatch.setenv("CC", "gcc-99")
    compiler, _ = check_compilers(both)
    assert (compiler.state, compiler.detail) == ("missing", "CC=gcc-99 is not there")


def test_nvcc() -> None:
    def found(release: str, *others: str) -> Finding:
        programs = {"/cuda/bin/nvcc": f"Cuda compilation tools, release {release}, V1"}
        host = OtherHost(programs=programs | dict.fromkeys(others, ""))
        (finding,) = check_nvcc(host, Path("/cuda"))
        return finding

    assert states(check_nvcc(OtherHost(), None)) == ["missing"]
    assert found("13.0", "/usr/bin/g++").detail == "13.0, /cuda/bin/nvcc"
    assert found("13.0").advice == "It calls g++: apt install g++."
    assert (found("12.4", "/usr/bin/g++").state, found("12.9", "/usr/bin/g++").state) == (
        "missing", "ok",
    )  # fmt: skip


def test_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, name in zip(CACHES, ("ours", "triton", "deep_gemm"), strict=True):
        monkeypatch.setenv(variable, str(tmp_path / name))
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "a.cubin").write_bytes(b"12345")
    (tmp_path / "file").touch()
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "file" / "below"))
    mounts = f"disk / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n"
    on_disk = [*check_caches(OtherHost(files={"/proc/mounts": "disk / ext4 rw 0 0\n"}))]
    assert [finding.check for finding in on_disk] == [*CACHES]
    assert states(on_disk) == ["note", "ok", "missing"]
    assert on_disk[1].detail == f"{tmp_path}/triton: 1 files, 5 bytes"
    in_memory = check_caches(OtherHost(files={"/proc/mounts": mounts}))
    assert states(in_memory) == ["warning", "warning", "missing"]


def test_a_cache_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete, it serves; the superuser may write anywhere."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("EPSERVE_CACHE", str(tmp_path))
    assert next(check_caches(OtherHost())).state == "missing"
    (tmp_path / "gemm.so").touch()
    assert next(check_caches(OtherHost())).state == "note"


def test_limits(tmp_path: Path) -> None:
    infinity = resource.RLIM_INFINITY
    assert [host_checks.check_open_files(n).state for n in (256, 1024, 65536, infinity)] == [
        "missing", "warning", "ok", "ok",
    ]  # fmt: skip
    assert host_checks.check_locked_memory(wanted=True, limit=65536).state == "warning"
    assert host_checks.check_locked_memory(wanted=False, limit=65536).state == "note"
    assert host_checks.check_locked_memory(wanted=True, limit=infinity).state == "ok"
    assert [host_checks.check_clock(n).state for n in (0, 5, -1)] == ["ok", "warning", "warning"]
    assert host_checks.check_shared_memory(str(tmp_path / "none")).state == "warning"
    assert host_checks.check_temporary_folder("/tmp").state == "ok"
    assert host_checks.check_temporary_folder("/" + "x" * 90).state == "missing"
    assert host_checks.check_log_room(tmp_path / "a" / "b").state in ("ok", "warning")
    (tmp_path / "file").touch()
    assert host_checks.check_log_room(tmp_path / "file" / "logs").state == "missing"
    finding = host_checks.check_log_room(tmp_path / ("long" * 100))
    assert finding.state == "missing"
    assert "File name too long" in finding.detail


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = host_checks.check_ports([port])
        assert finding.state == "warning"
        assert str(port) in finding.detail
    assert host_checks.check_ports([port]).state == "ok"


def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_model(tmp_path).state == "missing"
    demo = Path(__file__).resolve().parents[3] / "demo_model" / "checkpoint"
    finding = check_model(demo)
    assert (finding.state, finding.detail[:8]) == ("ok", "4 layers")
    monkeypatch.setenv("HOME", str(demo.parent))  # shells leave it in --model=~/...
    assert check_model(Path("~/checkpoint")).state == "ok"


def test_this_machine_can_run_the_control_plane() -> None:
    result = RUNNER.invoke(app, ["doctor", "--role", "control", "--output", "json"])
    assert result.exit_code == 0, result.output
    checks = {finding["check"]: finding["state"] for finding in json.loads(result.stdout)}
    assert checks["Python"] == "ok"
    assert "torch" not in checks


def test_what_is_missing_is_a_failure_with_advice() -> None:
    result = RUNNER.invoke(app, ["doctor", "--role", "control", "--model", "/nowhere"])
    assert result.exit_code == 1
    assert "model (missing): Download it again" in result.stdout


def test_it_runs_without_torch() -> None:
    """Also with nothing of it importable: it is for machines where things are missing."""
    program = (
        "import sys\n"
        "for name in ('torch', 'nixl', 'triton', 'transformers'): sys.modules[name] = None\n"
        "from ctl.main import app\n"
        "app(['doctor', '--role', 'control'], standalone_mode=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert done.returncode == 0, done.stderr
    assert "versions" in done.stdout
