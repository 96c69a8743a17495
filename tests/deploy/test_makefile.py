"""Which torch `make` has pip install: one that is small where there is no GPU."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.wheel import ROOT


@pytest.mark.parametrize("target", [".installed", ".installed-dev"])
def test_a_machine_with_a_gpu_takes_the_extra(tmp_path: Path, target: str) -> None:
    make = shutil.which("make")
    assert make is not None

    def command() -> str:
        """What it would run with nothing else on the path."""
        done = subprocess.run(
            [make, "--dry-run", "--always-make", f".venv/{target}"],
            cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        (line,) = [line for line in done.stdout.splitlines() if "pip install" in line]
        return line

    assert command().endswith(' "torch<2.14"')
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    assert command().endswith(' -e ".[gpu]"')
    assert "torch<" not in command()
