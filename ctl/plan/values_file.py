"""Worker groups of a values file of the chart, as the chart would start them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ctl.base.flags import WORKER_ROLES, WorkerRole

# Of the chart's own values, those that a plan depends on.
DEFAULTS: dict[str, Any] = {"nodes": 1, "ranks": 1, "device": "cpu", "settings": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerValues:
    """Of one role: `settings` are flags of its process."""

    role: WorkerRole
    nodes: int
    ranks: int
    device: str
    settings: Mapping[str, str]


def alike(role: WorkerRole, nodes: int, ranks: int) -> WorkerValues:
    """On GPUs, with the defaults of all flags."""
    return WorkerValues(role=role, nodes=nodes, ranks=ranks, device="cuda", settings={})


def read_values(file: Path) -> tuple[str, list[WorkerValues]]:
    """`model.path` ("" without one) and both roles. ValueError for a file that is no such
    values."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {error}") from error
    workers = _part(values, "workers", file)
    common = _part(workers, "common", file)
    roles = [
        _worker_values(role, common, _part(workers, role, file), file) for role in WORKER_ROLES
    ]
    return str(_part(values, "model", file).get("path", "")), roles


def _part(values: object, name: str, file: Path) -> dict[str, Any]:
    """An object below another; empty where there is none."""
    part = values.get(name) if isinstance(values, dict) else values
    if part is None and isinstance(values, dict):
        return {}
    if not isinstance(part, dict):
        raise ValueError(f"{file}: {name} is no object: these are no values of the chart")
    return part


def _worker_values(
    role: WorkerRole, common: dict[str, Any], own: dict[str, Any], file: Path
) -> WorkerValues:
    told = DEFAULTS | common | own
    for name in ("nodes", "ranks"):
        if not isinstance(told[name], int) or told[name] < 1:
            raise ValueError(f"{file}: workers.{role}.{name} is {told[name]!r}, not a whole number")
    settings = _part(common, "settings", file) | _part(own, "settings", file)
    return WorkerValues(
        role=role,
        nodes=told["nodes"],
        ranks=told["ranks"],
        device=str(told["device"]),
        settings={flag: _text(value) for flag, value in settings.items()},
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
