"""The wheel of the tree at hand, made with the setuptools that is here: no index is asked."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta as b; print(b.build_wheel(sys.argv[1]))"


def tracked(*folders: str) -> list[Path]:
    """Files of the repository, as a commit of the tree at hand would hold them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    return [Path(name) for name in listed if name and (ROOT / name).is_file()]


def clone_into(folder: Path) -> Path:
    """A build leaves files in its source folder."""
    for path in tracked():
        if path.parts[0] not in ("tests", "docs"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)
    return folder


def build_wheel(project: Path, output: Path) -> Path:
    subprocess.run(
        [sys.executable, "-c", BUILD, str(output)], cwd=project, capture_output=True, check=True
    )
    (built,) = output.glob("*.whl")
    return built
