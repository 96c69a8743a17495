"""The processes of a `ctl up` of this user on this machine, found in Linux' /proc: whatever of it
is up, dead or stopped just now.

What tells them is the environment that `ctl up` gave them: their temporary folder is its own.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from core.address import is_loopback, parse_address
from ctl.base.cluster_access import RUN_FOLDER_PREFIX
from ctl.base.flags import ROLES, Role, parse_arguments
from ctl.local.process_spec import ProcessSpec

_PROC = Path("/proc")
_RANK_START = "EPSERVE_RANK_START"  # what a front tells its ranks, JSON


class NotOurs(ValueError):
    """There is no cluster of ours there; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProcess:
    """One that runs. `name` of rank 1 of decode-0 is decode-0/1; a rank has no `flags`."""

    name: str
    role: Role
    pid: int
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def front(self) -> str:
        """Its own name, or that of the worker whose rank it is."""
        return self.name.partition("/")[0]

    @property
    def spec(self) -> ProcessSpec:
        """Of one that is no rank: what is asked whether it serves."""
        return ProcessSpec(
            name=self.name, role=self.role, address=self.flags["listen"], flags=self.flags
        )


@dataclass(frozen=True, slots=True)
class OwnCluster:
    """`run_folder` is the temporary folder of its `ctl up`."""

    run_folder: Path

    @classmethod
    def find(cls, router: str) -> "OwnCluster":
        """Whose router listens at `router`. Raises NotOurs, or ValueError for no address."""
        address = parse_address(router)
        for pid, environment in _environments():
            found = _process(pid, environment)
            folder = Path(environment.get("TMPDIR", ""))
            if (
                found is not None
                and found.role == "router"
                and parse_address(found.flags["listen"]).port == address.port
                and is_loopback(address.host)
                and folder.name.startswith(RUN_FOLDER_PREFIX)
            ):
                return cls(folder)
        raise NotOurs(f"no router of a `ctl up` of this user on this machine listens at {router}")

    def processes(self) -> dict[str, OwnProcess]:
        """All that run now, by name."""
        found = [_process(pid, environment) for pid, environment in self._members()]
        return {each.name: each for each in sorted(filter(None, found), key=lambda it: it.name)}

    def environment(self) -> Mapping[str, str]:
        """Of a process that `ctl up` started. Raises NotOurs when none runs."""
        for pid, environment in self._members():
            if (found := _process(pid, environment)) is not None and found.flags:
                return environment
        raise NotOurs(f"no process of the `ctl up` of {self.run_folder} runs")

    def connected_from(self, port: int, to_port: int) -> str:
        """Name of the process, a worker's for its ranks, that a TCP connection on this machine
        comes from; "" for one that is not of this cluster."""
        sockets = {f"socket:[{inode}]" for inode in _inodes(port, to_port)}
        members = dict(self._members())
        found = [_process(pid, environment) for pid, environment in members.items()]
        names = {each.pid: each.front for each in found if each is not None}
        for pid in members:
            with suppress(OSError):
                for descriptor in (_PROC / str(pid) / "fd").iterdir():
                    with suppress(OSError):
                        if os.readlink(descriptor) in sockets:
                            return _nearest(pid, names)
        return ""

    def _members(self) -> Iterator[tuple[int, dict[str, str]]]:
        for pid, environment in _environments():
            if environment.get("TMPDIR") == str(self.run_folder):
                yield pid, environment


def _environments() -> Iterator[tuple[int, dict[str, str]]]:
    """Process ids of this user, and the environments they were started with."""
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                yield int(folder.name), dict(p.split("=", 1) for p in pairs if "=" in p)


def _process(pid: int, environment: Mapping[str, str]) -> OwnProcess | None:
    """None for what a process of a cluster has started by itself, or what is none."""
    try:
        command = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    package, _, part = module.partition(".")
    role = next((role for role in ROLES if package in (role, f"{role}_worker")), None)
    if role is None:
        return None
    if part == "rank" and _RANK_START in environment:
        start = json.loads(environment[_RANK_START])
        name = f"{start['settings']['name']}/{start['local_rank']}"
        return OwnProcess(name=name, role=role, pid=pid)
    flags = parse_arguments(list(filter(None, command)))
    if part or not {"name", "listen"} <= flags.keys():
        return None
    return OwnProcess(name=flags["name"], role=role, pid=pid, flags=flags)


def _inodes(port: int, to_port: int) -> Iterator[str]:
    """Of sockets that are connected so. gRPC's are of IPv6, with an IPv4 address in it."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                ports = [int(words[column].rpartition(":")[2], 16) for column in (1, 2)]
                if ports == [port, to_port]:
                    yield words[9]


def _nearest(pid: int, names: Mapping[int, str]) -> str:
    """Name of the process, or of the nearest one above it that has one."""
    with suppress(OSError):
        while pid > 1 and pid not in names:
            status = (_PROC / str(pid) / "stat").read_text()
            pid = int(status.rpartition(")")[2].split()[1])
    return names.get(pid, "")
