"""`ctl doctor` on machines of all kinds, and on this one."""

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ctl.base.host import Host
from ctl.doctor import host_checks
from ctl.doctor.device_checks import check_gpus, check_nvlink, check_rdma, count_devices
from ctl.doctor.doctor import check_model
from ctl.doctor.finding import Finding
from ctl.doctor.package_checks import check_fast_paths, check_nixl, check_python, check_torch
from ctl.main import app

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
    ) -> None:
        self.gpus, self.topology, self.python = gpus, topology, python
        self.files, self.versions = files or {}, versions or {}

    def run(self, *command: str) -> str:
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


def states(findings: Iterable[Finding]) -> list[str]:
    return [finding.state for finding in findings]


def test_gpus() -> None:
    none = OtherHost()
    assert count_devices(none) == 0
    assert states(check_gpus(none, needed=False)) == ["note"]
    assert states(check_gpus(none, needed=True)) == ["missing"]
    two = OtherHost(gpus=(H200.format(0), H200.format(1)))
    (finding,) = check_gpus(two, needed=True)
    assert finding.detail == "2 x NVIDIA H200, 143771 MiB; driver 580.65"
    old = OtherHost(gpus=("0, NVIDIA A100, 81920 MiB, 8.0, 580.65",))
    assert states(check_gpus(old, needed=True)) == ["ok", "warning"]


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
    host = OtherHost(versions={"sgl-deep-gemm": "0.1.4"})
    _, deep_gemm, flash_mla = check_fast_paths(host, cuda=True)
    assert (deep_gemm.state, deep_gemm.detail) == ("ok", "0.1.4")
    assert "without it our own kernels compute" in flash_mla.advice


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
