"""Flags of the cluster's processes: by role, and on a command line."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

Role = Literal["gateway", "router", "prefill", "decode"]
WorkerRole = Literal["prefill", "decode"]

WORKER_ROLES: tuple[WorkerRole, ...] = ("prefill", "decode")
ROLES: tuple[Role, ...] = ("gateway", "router", *WORKER_ROLES)
# What reads a role's flags: module and class, by name, as they are not imported here.
SETTINGS: Mapping[Role, str] = {
    "gateway": "gateway.base.settings.GatewaySettings",
    "router": "router.settings.RouterSettings",
    "prefill": "engine.process.settings.WorkerSettings",
    "decode": "engine.process.settings.WorkerSettings",
}


def flag_arguments(flags: Mapping[str, str]) -> list[str]:
    """`flags` are without leading dashes; "true" and "false" are those of a switch: --flag,
    --no-flag."""
    arguments = []
    for name, value in flags.items():
        if value in ("true", "false"):
            arguments.append(f"--{name}" if value == "true" else f"--no-{name}")
        else:
            arguments += [f"--{name}", value]
    return arguments


def parse_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Flags of a command line that `flag_arguments` made."""
    flags = {}
    for name, value in pairwise([*arguments, "--"]):
        if not name.startswith("--"):
            continue
        if not value.startswith("--"):
            flags[name[2:]] = value
        elif name.startswith("--no-"):
            flags[name[5:]] = "false"
        else:
            flags[name[2:]] = "true"
    return flags


def parse_settings(texts: Iterable[str]) -> dict[Role, dict[str, str]]:
    """ROLE.FLAG=VALUE texts by role. Raises ValueError for one of another form."""
    settings: dict[Role, dict[str, str]] = {role: {} for role in ROLES}
    for text in texts:
        target, equals, value = text.partition("=")
        role_name, dot, flag = target.partition(".")
        role = next((role for role in ROLES if role == role_name), None)
        if role is None or not (equals and dot and flag):
            raise ValueError(f"{text!r} is not ROLE.FLAG=VALUE, ROLE one of {', '.join(ROLES)}")
        settings[role][flag.replace("_", "-")] = value
    return settings
