"""GPUs, the links between them, and RDMA devices."""

from collections.abc import Iterator

from ctl.base.host import Host
from ctl.doctor.finding import Finding, missing, note, ok, warning

_QUERY = ("index", "name", "memory.total", "compute_cap", "driver_version")
# FP8 and W4A8 kernels are written for Hopper.
_HOPPER = (9, 0)
_LEAST_DRIVER = 580


def count_devices(host: Host) -> int:
    """GPUs that the driver shows."""
    return len(_gpus(host))


def check_gpus(host: Host, *, needed: bool) -> Iterator[Finding]:
    """One finding for all GPUs, and what is wrong with them."""
    gpus = _gpus(host)
    if not gpus:
        detail = "none (nvidia-smi shows no GPU)"
        advice = "Install the NVIDIA driver, or give the container GPUs (nvidia.com/gpu, --gpus)."
        yield (
            missing("GPU", detail, advice)
            if needed
            else note("GPU", f"{detail}; workers compute on cpu")
        )
        return
    kinds = sorted({f"{name}, {memory}" for _index, name, memory, *_ in gpus})
    yield ok("GPU", f"{len(gpus)} x {'; '.join(kinds)}")
    yield _check_driver(gpus[0][4])
    old = [gpu for gpu in gpus if _capability(gpu[3]) < _HOPPER]
    if old:
        detail = f"{old[0][1]} has compute capability {old[0][3]}"
        advice = "FP8 and W4A8 checkpoints are fast from Hopper (9.0) on; use a BF16 one."
        yield warning("GPU generation", detail, advice)


def _check_driver(version: str) -> Finding:
    major = version.partition(".")[0]
    if major.isdigit() and int(major) >= _LEAST_DRIVER:
        return ok("driver", version)
    advice = f"CUDA 13, which epserve[gpu] is built for, needs {_LEAST_DRIVER} or newer: update it."
    return missing("driver", version, advice)


def check_nvlink(host: Host) -> Finding:
    """Whether GPUs of this machine reach each other without PCIe."""
    num_gpus = count_devices(host)
    if num_gpus < 2:
        return note("NVLink", f"{num_gpus} GPUs: nothing to link")
    matrix = host.run("nvidia-smi", "topo", "-m")
    rows = [line.split() for line in matrix.splitlines() if line.startswith("GPU")]
    linked = sum(any(cell.startswith("NV") for cell in row[1 : num_gpus + 1]) for row in rows)
    if linked == num_gpus:
        return ok("NVLink", f"all {num_gpus} GPUs are linked")
    advice = (
        "Ranks of an EP group talk over PCIe: expect slow dispatch and combine. In a container, "
        "look whether nvidia-fabricmanager runs on the host."
    )
    return warning("NVLink", f"{linked} of {num_gpus} GPUs are linked", advice)


def check_rdma(host: Host, *, wanted: bool) -> Iterator[Finding]:
    """RDMA ports that are up, and what they need: device files, GPU memory."""
    ports = [
        f"{device}/{port}"
        for device in host.names("/sys/class/infiniband")
        for port in host.names(f"/sys/class/infiniband/{device}/ports")
        if "ACTIVE" in host.read(f"/sys/class/infiniband/{device}/ports/{port}/state")
    ]
    if not ports:
        detail = "no active port in /sys/class/infiniband"
        advice = "Between machines, KV goes over TCP. Give the pod its rdma/... resource."
        yield warning("RDMA", detail, advice) if wanted else note("RDMA", detail)
        return
    yield ok("RDMA", f"active: {', '.join(ports)}")
    if not any(name.startswith("uverbs") for name in host.names("/dev/infiniband")):
        advice = "Give the container /dev/infiniband (or its rdma/... resource)."
        yield warning("RDMA device files", "no /dev/infiniband/uverbs*", advice)
    if wanted and "nvidia_peermem" not in host.read("/proc/modules"):
        advice = (
            "Unless the driver offers DMA-BUF, KV is staged through host memory: "
            "modprobe nvidia_peermem."
        )
        yield note("GPUDirect RDMA", "nvidia_peermem is not loaded", advice)


def _gpus(host: Host) -> list[tuple[str, ...]]:
    """index, name, memory, compute capability and driver of each."""
    query = f"--query-gpu={','.join(_QUERY)}"
    listed = host.run("nvidia-smi", query, "--format=csv,noheader")
    cells = [tuple(cell.strip() for cell in line.split(",")) for line in listed.splitlines()]
    return [row for row in cells if len(row) == len(_QUERY)]


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
