"""What is needed to start one process of the cluster and to see that it serves."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from ctl.base.flags import Role, flag_arguments

_LONGEST_GRACE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """`python -m module --flag value ...`; stays the same over restarts.

    name     of the process, and of its log file
    flags    without leading dashes; "true" and "false" are those of a switch: --flag, --no-flag
    command  instead of `python -m module`, for tests
    """

    name: str
    role: Role
    address: str
    metrics_address: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int = 0
    device: str = ""
    command: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """The whole command line, program first."""
        module = self.role if self.role in ("gateway", "router") else f"{self.role}_worker"
        program = list(self.command) or [sys.executable, "-m", module]
        return program + flag_arguments(self.flags)

    @property
    def speaks_tls(self) -> bool:
        """A gateway that has a certificate."""
        return bool(self._of_gateway("tls-cert"))

    @property
    def asks_for_keys(self) -> bool:
        """A gateway that has API keys."""
        return bool(self._of_gateway("api-keys") or self._of_gateway("api-keys-file"))

    @property
    def guards_all_paths(self) -> bool:
        """A gateway that asks for a key wherever it is asked."""
        try:
            return TypeAdapter(bool).validate_python(self._of_gateway("guard-all-paths") or False)
        except ValidationError:
            return False  # the process itself refuses it

    @property
    def grace_seconds(self) -> float:
        """How long running requests may go on after SIGTERM, by the flags."""
        given = self.flags.get("grace-seconds" if self.role == "gateway" else "stop-grace-seconds")
        try:
            return max(0.0, min(float(given or 0), _LONGEST_GRACE_SECONDS))
        except ValueError:
            return 0.0  # the process itself refuses it

    def _of_gateway(self, flag: str) -> str:
        """What a gateway is given by the flag, or by the environment that it has from us; empty:
        by neither, or it is no gateway."""
        if self.role != "gateway":
            return ""
        variable = "EPSERVE_" + flag.upper().replace("-", "_")
        return self.flags.get(flag) or os.environ.get(variable, "")
