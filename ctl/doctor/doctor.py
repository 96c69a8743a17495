"""`ctl doctor`: whether this machine can run epserve, and what to do where it cannot."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from core.cuda_home import cuda_home
from core.errors import CheckpointError
from ctl.base.checkpoint import check_model_folder, weight_files
from ctl.base.host import Host
from ctl.base.output import Output, show
from ctl.base.tables import make_table
from ctl.doctor import host_checks
from ctl.doctor.cluster_checks import check_cluster
from ctl.doctor.device_checks import check_gpus, check_nvlink, check_rdma, count_devices
from ctl.doctor.finding import Finding, missing, ok
from ctl.doctor.fit_check import check_fit
from ctl.doctor.network_checks import check_network
from ctl.doctor.package_checks import (
    check_fast_paths,
    check_gpu_set,
    check_nixl,
    check_own_packages,
    check_python,
    check_torch,
    check_versions,
)
from ctl.doctor.toolchain_checks import check_caches, check_compilers, check_nvcc
from epserve_start.clashes import clashes

# Gateway, router, and two ports for each of a few workers.
_NUM_PORTS = 10
_STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "missing": "bold red"}


def doctor(
    role: Annotated[
        Literal["all", "worker", "control"],
        typer.Option(help="What is to run here; control: gateway and router, without torch"),
    ] = "all",
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="What workers are to compute on; auto: cuda where there is a GPU"),
    ] = "auto",
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder to look at", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65000, help="First port of `ctl up`")] = 8000,
    log_dir: Annotated[Path, typer.Option(help="Folder for logs")] = Path("logs"),
    router: Annotated[
        str,
        typer.Option(
            help="host:port of a router, to look for what is stuck in its cluster; default: that "
            "of a `ctl up` here",
            envvar="EPSERVE_ROUTER",
            show_default=False,
        ),
    ] = "",
    output: Output = "table",
) -> None:
    """Checks GPUs, driver, NVLink, RDMA, NIXL, libraries, compilers, caches, ports, limits, clock
    and disk of this machine, and what is stuck in a cluster that runs.

    Exit status 1 if something is missing without which epserve does not work here; warnings say
    what makes it slower.
    """
    host = Host()
    cuda = device == "cuda" or (device == "auto" and count_devices(host) > 0)
    findings = [
        *_examine(host, role, cuda=cuda, must=device == "cuda", model=model),
        host_checks.check_ports(range(port, port + _NUM_PORTS)),
        host_checks.check_log_room(log_dir.expanduser().resolve()),
        *check_cluster(router, port),
    ]
    show([asdict(finding) for finding in findings], output, _print)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


def _examine(
    host: Host, role: str, *, cuda: bool, must: bool, model: Path | None
) -> Iterator[Finding]:
    yield check_versions(host)
    yield check_python()
    yield from check_own_packages(clashes())
    if role != "control":
        yield from check_gpus(host, needed=must)
        yield check_nvlink(host)
        rdma = [*check_rdma(host, wanted=cuda)]
        yield from rdma
        has_rdma = any(finding.state == "ok" for finding in rdma)
        yield host_checks.check_locked_memory(wanted=has_rdma)
        yield from check_network(host, wanted=cuda and has_rdma)
        yield check_torch(host, cuda=cuda)
        yield check_nixl(host)
        yield check_gpu_set(host, cuda=cuda)
        yield from check_fast_paths(host, cuda=cuda)
        if cuda:
            yield from check_compilers(host)
            yield from check_nvcc(host, cuda_home())
            yield from check_caches(host)
        yield host_checks.check_shared_memory()
    if model is not None:
        found = check_model(model)
        yield found
        if role != "control" and found.state == "ok":
            yield check_fit(host, model.expanduser())
    yield host_checks.check_open_files()
    yield host_checks.check_temporary_folder()
    yield host_checks.check_clock()


def check_model(folder: Path) -> Finding:
    """Whether the folder can be served, and how large its weights are."""
    folder = folder.expanduser()
    try:
        config = check_model_folder(folder)
    except CheckpointError as error:
        return missing("model", error.message, "Download it again, or name another folder.")
    size = sum((folder / name).stat().st_size for name in weight_files(folder))
    layers, experts = config.num_layers, config.num_experts
    return ok("model", f"{layers} layers, {experts} experts, {decimal(size)}")


def _print(findings: list[dict[str, str]], console: Console) -> None:
    table = make_table("check", "state", "found", fold="found")
    for finding in findings:
        state = finding["state"]
        table.add_row(finding["check"], Text(state, _STYLES[state]), finding["detail"])
    console.print(table)
    advised = [finding for finding in findings if finding["advice"]]
    if advised:
        console.print("\nWhat to do:")
    for finding in advised:
        told = f"  {finding['check']} ({finding['state']}): {finding['advice']}"
        console.print(told, soft_wrap=True)
