"""GPUs, the links between them, and RDMA devices."""

from ctl.finding import Finding
from ctl.host import Host

_QUERY = "index,name,memory.total,compute_cap,driver_version"
# FP8 and W4A8 kernels are written for Hopper.
_HOPPER = (9, 0)


def count_devices(host: Host) -> int:
    """GPUs that the driver shows."""
    return len(_gpus(host))


def check_gpus(host: Host, *, needed: bool) -> list[Finding]:
    """One finding for all GPUs, and what is wrong with them."""
    gpus = _gpus(host)
    if not gpus:
        detail = "none (nvidia-smi shows no GPU)"
        if not needed:
            return [Finding(check="GPU", state="note", detail=f"{detail}; workers compute on cpu")]
        advice = "Install the NVIDIA driver, or give the container GPUs (nvidia.com/gpu, --gpus)."
        return [Finding(check="GPU", state="missing", detail=detail, advice=advice)]
    kinds = sorted({f"{name}, {memory}" for _index, name, memory, _capability, _driver in gpus})
    driver = gpus[0][4]
    detail = f"{len(gpus)} x {'; '.join(kinds)}; driver {driver}"
    findings = [Finding(check="GPU", state="ok", detail=detail)]
    old = [gpu for gpu in gpus if _capability(gpu[3]) < _HOPPER]
    if old:
        findings.append(
            Finding(
                check="GPU generation",
                state="warning",
                detail=f"{old[0][1]} has compute capability {old[0][3]}",
                advice="FP8 and W4A8 checkpoints are fast from Hopper (9.0) on; use a BF16 one.",
            )
        )
    return findings


def check_nvlink(host: Host) -> list[Finding]:
    """Whether GPUs of this machine reach each other without PCIe."""
    num_gpus = count_devices(host)
    if num_gpus < 2:
        detail = f"{num_gpus} GPUs: nothing to link"
        return [Finding(check="NVLink", state="note", detail=detail)]
    matrix = host.run("nvidia-smi", "topo", "-m") or ""
    rows = [line.split() for line in matrix.splitlines() if line.startswith("GPU")]
    linked = sum(any(cell.startswith("NV") for cell in row[1 : num_gpus + 1]) for row in rows)
    if linked == num_gpus:
        return [Finding(check="NVLink", state="ok", detail=f"all {num_gpus} GPUs are linked")]
    return [
        Finding(
            check="NVLink",
            state="warning",
            detail=f"{linked} of {num_gpus} GPUs are linked",
            advice="Ranks of an EP group talk over PCIe: expect slow dispatch and combine. In a "
            "container, look whether nvidia-fabricmanager runs on the host.",
        )
    ]


def check_rdma(host: Host, *, wanted: bool) -> list[Finding]:
    """RDMA ports that are up, and what they need: device files, locked memory, GPU memory."""
    ports = [
        f"{device}/{port}"
        for device in host.names("/sys/class/infiniband")
        for port in host.names(f"/sys/class/infiniband/{device}/ports")
        if "ACTIVE" in (host.read(f"/sys/class/infiniband/{device}/ports/{port}/state") or "")
    ]
    if not ports:
        advice = "Between machines, KV goes over TCP. Give the pod its rdma/... resource."
        return [
            Finding(
                check="RDMA",
                state="warning" if wanted else "note",
                detail="no active port in /sys/class/infiniband",
                advice=advice if wanted else "",
            )
        ]
    findings = [Finding(check="RDMA", state="ok", detail=f"active: {', '.join(ports)}")]
    if not any(name.startswith("uverbs") for name in host.names("/dev/infiniband")):
        findings.append(
            Finding(
                check="RDMA device files",
                state="warning",
                detail="no /dev/infiniband/uverbs*",
                advice="Give the container /dev/infiniband (or its rdma/... resource).",
            )
        )
    modules = host.read("/proc/modules") or ""
    if wanted and "nvidia_peermem" not in modules:
        findings.append(
            Finding(
                check="GPUDirect RDMA",
                state="note",
                detail="nvidia_peermem is not loaded",
                advice="Unless the driver offers DMA-BUF, KV is staged through host memory: "
                "modprobe nvidia_peermem.",
            )
        )
    return findings


def _gpus(host: Host) -> list[tuple[str, ...]]:
    """index, name, memory, compute capability and driver of each."""
    listed = host.run("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader") or ""
    cells = [tuple(cell.strip() for cell in line.split(",")) for line in listed.splitlines()]
    return [row for row in cells if len(row) == len(_QUERY.split(","))]


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
