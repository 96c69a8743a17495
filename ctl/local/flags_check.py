"""Flags of the operator's are refused before anything starts."""

import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from ctl.base.flags import SETTINGS, flag_arguments
from ctl.base.python_process import package_environment
from ctl.local.process_spec import ProcessSpec
from ctl.plan.asking import reason


def check_flags(specs: Sequence[ProcessSpec], environment: Mapping[str, str]) -> None:
    """Raises ValueError that names the first process of each role that would not take its flags,
    and why."""
    firsts = {spec.role: spec for spec in reversed(specs)}
    done = subprocess.run(
        [sys.executable, "-m", "core.settings_check"],
        input=msgspec.json.encode(
            [(SETTINGS[role], flag_arguments(spec.flags)) for role, spec in firsts.items()]
        ),
        stdout=subprocess.PIPE,
        env=package_environment() | dict(environment),
        check=True,
    )
    complaints = zip(firsts.values(), msgspec.json.decode(done.stdout, type=list[str]), strict=True)
    problems = [f"{spec.name}: {reason(told)}" for spec, told in complaints if told]
    if problems:
        raise ValueError("; ".join(reversed(problems)))
