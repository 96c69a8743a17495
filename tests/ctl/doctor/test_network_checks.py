"""What `ctl doctor` says of networks, on hosts that are made up."""

from pathlib import Path

import pytest

from ctl.base.host import Host
from ctl.doctor.finding import Finding
from ctl.doctor.network_checks import check_network

# As the driver prints it, cut.
PARAMS = """\
ResmanDebugLevel: 4294967295
EnableStreamMemOPs: {}
DynamicPowerManagement: 3
RegistryDwords: "{}"
RegistryDwordsPerDevice: ""
"""


class RootedHost(Host):
    """This machine's files, below another root."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str) -> str:
        return super().read(f"{self._root}{path}")

    def names(self, folder: str) -> list[str]:
        return super().names(f"{self._root}{folder}")

    def write(self, path: str, text: str = "") -> None:
        file = Path(f"{self._root}{path}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def add_port(
        self, device: str, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)"
    ) -> None:
        folder = f"/sys/class/infiniband/{device}/ports/1"
        for name, text in {"state": state, "rate": rate, "link_layer": "InfiniBand"}.items():
            self.write(f"{folder}/{name}", f"{text}\n")


@pytest.fixture
def host(tmp_path: Path) -> RootedHost:
    """One on which all is well."""
    made = RootedHost(tmp_path)
    for device in ("mlx5_0", "mlx5_1"):
        made.add_port(device)
    made.write("/sys/class/net/eth0/operstate")
    made.write("/proc/driver/nvidia/params", PARAMS.format(1, "PeerMappingOverride=1;"))
    made.write("/dev/gdrdrv")
    return made


def found(host: Host, *, wanted: bool = True, **environment: str) -> dict[str, Finding]:
    return {
        each.check: each for each in check_network(host, wanted=wanted, environment=environment)
    }


def test_a_host_on_which_all_is_well(host: RootedHost) -> None:
    variables = {
        "NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1", "NVSHMEM_HCA_LIST": "mlx5_0:1",
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1,eth0",
    }  # fmt: skip
    assert {each.state for each in found(host, **variables).values()} == {"ok"}


@pytest.mark.parametrize("params", ["", PARAMS.format(0, ""), PARAMS.format(1, "Other=1;")])
def test_options_of_the_driver(host: RootedHost, params: str) -> None:
    host.write("/proc/driver/nvidia/params", params)
    finding = found(host)["IBGDA"]
    assert (finding.state, "RegistryDwords" in finding.detail) == ("warning", True)
    assert 'NVreg_RegistryDwords="PeerMappingOverride=1;"' in finding.advice
    assert "IBGDA" not in found(host, wanted=False), "nothing for those who need none of it"


def test_ports_that_are_down_or_slow(host: RootedHost) -> None:
    host.add_port("mlx5_2", state="1: DOWN")
    host.add_port("mlx5_3", rate="100 Gb/sec (4X EDR)")
    findings = found(host)
    assert findings["RDMA ports down"].detail == "mlx5_2/1"
    assert "mlx5_3/1 at 100 Gb/s" in findings["RDMA rate"].detail
    assert "mlx5_0" not in findings["RDMA rate"].detail


def test_gdrcopy(host: RootedHost, tmp_path: Path) -> None:
    (tmp_path / "dev/gdrdrv").unlink()
    assert found(host)["GDRCopy"].state == "note"
    host.write("/proc/modules", "gdrdrv 28672 0 - Live 0x0\n")
    assert "NVIDIA_GDRCOPY" in found(host)["GDRCopy"].advice


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("NCCL_SOCKET_IFNAME", "bond0", "bond0"),
        ("NCCL_SOCKET_IFNAME", "=eth", "eth"),
        ("GLOO_SOCKET_IFNAME", "eth", "eth"),
        ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "=net1", "net1"),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_9:1", "mlx5_9"),
        ("NVSHMEM_HCA_LIST", "mlx5_bond_0:1", "mlx5_bond_0"),
        ("UCX_NET_DEVICES", "mlx5_0:1,net1", "net1"),
    ],
)
def test_names_of_what_is_not_there(
    host: RootedHost, variable: str, value: str, named: str
) -> None:
    finding = found(host, **{variable: value})["network variables"]
    assert finding.state == "warning"
    assert finding.detail == f"{variable}={value}: there is no {named}"


def test_names_that_exclude_are_nobodys_fault(host: RootedHost) -> None:
    assert "network variables" not in found(
        host, NCCL_SOCKET_IFNAME="^docker", NCCL_IB_HCA="^mlx5_7", UCX_NET_DEVICES="all"
    )
