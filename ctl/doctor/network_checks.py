"""What DeepEP, NCCL and UCX need of a host to reach others. docs/network.md says why."""

import os
import re
from collections.abc import Iterator, Mapping

from ctl.base.host import Host
from ctl.doctor.finding import Finding, note, ok, warning

_RDMA = "/sys/class/infiniband"
_INTERFACES = "/sys/class/net"
# These take beginnings of names, whole ones after "=".
_BEGINNINGS = ("NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NCCL_IB_HCA")
_DEVICES = ("NCCL_IB_HCA", "NVSHMEM_HCA_LIST", "UCX_NET_DEVICES")
_SOCKETS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")
_DRIVER_OPTIONS = {"EnableStreamMemOPs": "1", "RegistryDwords": "PeerMappingOverride=1"}


def check_network(
    host: Host, *, wanted: bool, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """`wanted`: GPUs of this host are to reach others by RDMA."""
    yield from check_ports(host)
    if wanted:
        yield check_driver_options(host)
        yield check_gdrcopy(host)
    yield from check_names(host, environment)


def check_ports(host: Host) -> Iterator[Finding]:
    """RDMA ports that are down, or came up slower than others of their kind."""
    down: list[str] = []
    rates: dict[str, dict[str, int]] = {}
    for device in host.names(_RDMA):
        for port in host.names(f"{_RDMA}/{device}/ports"):
            told = {
                name: host.read(f"{_RDMA}/{device}/ports/{port}/{name}").strip()
                for name in ("state", "rate", "link_layer")
            }
            if "ACTIVE" not in told["state"]:
                down.append(f"{device}/{port}")
            elif rate := re.match(r"\d+", told["rate"]):
                rates.setdefault(told["link_layer"], {})[f"{device}/{port}"] = int(rate[0])
    if down:
        yield note("RDMA ports down", ", ".join(down), "Look at cables, switches, subnet manager.")
    for link_layer, ports in rates.items():
        best = max(ports.values())
        slow = [f"{port} at {rate} Gb/s" for port, rate in ports.items() if rate < best]
        if slow:
            advice = (
                "Unless these are for other things: a bad cable or switch port slows all ranks."
            )
            yield note("RDMA rate", f"{link_layer}, others {best} Gb/s: {', '.join(slow)}", advice)


def check_driver_options(host: Host) -> Finding:
    """Without them GPUs cannot make adapters send (IBGDA), as DeepEP between nodes wants it."""
    lines = host.read("/proc/driver/nvidia/params").splitlines()
    params = {name: value for name, _, value in (line.partition(": ") for line in lines)}
    lacking = [name for name, value in _DRIVER_OPTIONS.items() if value not in params.get(name, "")]
    if not lacking:
        return ok("IBGDA", "the driver lets GPUs make adapters send")
    advice = (
        "DeepEP between nodes needs options of the NVIDIA driver: NVreg_EnableStreamMemOPs=1 "
        'NVreg_RegistryDwords="PeerMappingOverride=1;" in /etc/modprobe.d, and a reboot.'
    )
    return warning("IBGDA", f"not set: {', '.join(lacking)}", advice)


def check_gdrcopy(host: Host) -> Finding:
    """For small copies between GPU and host."""
    if "gdrdrv" in host.names("/dev"):
        return ok("GDRCopy", "/dev/gdrdrv")
    if "gdrdrv" in host.read("/proc/modules"):
        advice = "Have the container runtime hand it in: NVIDIA_GDRCOPY=enabled."
        return note("GDRCopy", "gdrdrv is loaded, /dev/gdrdrv is not here", advice)
    return note("GDRCopy", "gdrdrv is not loaded: small KV pages are copied slower")


def check_names(host: Host, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Interfaces and adapters that variables name and this host has not."""
    interfaces, devices = host.names(_INTERFACES), host.names(_RDMA)
    for variable in (*_SOCKETS, *_DEVICES):
        value = environment.get(variable, "")
        there = interfaces if variable in _SOCKETS else [*devices, *interfaces]
        begins = variable in _BEGINNINGS and not value.startswith("=")
        unknown = [
            name
            for name in _names(value)
            if not (any(each.startswith(name) for each in there) if begins else name in there)
        ]
        if unknown:
            detail = f"{variable}={value}: there is no {', '.join(unknown)}"
            yield warning("network variables", detail, f"This host has {', '.join(there)}.")


def _names(value: str) -> list[str]:
    """What a list names; nothing for one that only excludes, or stands for all."""
    if value.startswith("^") or value == "all":
        return []
    names = (entry.partition(":")[0] for entry in value.removeprefix("=").split(","))
    return [name for name in names if name]
