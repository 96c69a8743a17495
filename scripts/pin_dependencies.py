"""deploy/constraints*.txt: the version of everything that each variant of the image may install.

python scripts/pin_dependencies.py           # writes the files; asks the package index

Versions are those of this environment, so run it in one that the tests have passed in. What the
extra `gpu` brings is not installed here: pip resolves it for the image's Python.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# Extras that each variant of the image has (see deploy/Dockerfile), and what builds epserve itself.
VARIANTS = {
    "constraints.txt": ("kubernetes", "tracing"),
    "constraints-cuda.txt": ("kubernetes", "tracing", "gpu"),
}
BUILD = ("setuptools",)
IMAGE_PYTHON = "3.12"
GPU = "gpu"
# A CUDA build of torch asks for one version of it; a CPU build for none.
CHOSEN_BY_TORCH = ("triton",)

HEADER = """# What the image may install. Made by scripts/pin_dependencies.py; do not edit.
"""


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def of_extras(extras: Iterable[str]) -> list[Requirement]:
    return [Requirement(text) for e in extras for text in PROJECT["optional-dependencies"][e]]


def direct_requirements(extras: Iterable[str]) -> list[Requirement]:
    """What pyproject.toml asks for, with these of its extras."""
    return [*map(Requirement, (*PROJECT["dependencies"], *BUILD)), *of_extras(extras)]


def installed(extras: Iterable[str]) -> dict[str, str]:
    """Versions of all that the requirements lead to in this environment, by canonical name."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    pending = direct_requirements(extras)
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            holder = distribution(name)
            # Any build of that version: "+cpu" is for one variant of the image alone.
            found[name] = holder.version.partition("+")[0]
            for text in holder.requires or ():
                inner = Requirement(text)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    pending.append(inner)
    return found


def resolve(wanted: Iterable[Requirement], pins: Mapping[str, str], folder: Path) -> dict[str, str]:
    """What pip would install into the image, by canonical name. Installs nothing."""
    pinned = folder / "constraints.txt"
    pinned.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
    report = folder / "report.json"
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
            "--only-binary=:all:", "--python-version", IMAGE_PYTHON,
            # Else it downloads several GB to read what they need.
            "--use-feature=fast-deps",
            "--target", str(folder), "--report", str(report), "--constraint", str(pinned),
            *map(str, wanted),
        ],
        check=True,
    )  # fmt: skip
    chosen = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {canonicalize_name(each["name"]): each["version"].partition("+")[0] for each in chosen}


def constraints(extras: Sequence[str]) -> str:
    """The file for an image with these extras."""
    here = installed(extra for extra in extras if extra != GPU)
    gpu = of_extras(extra for extra in extras if extra == GPU)
    chosen = {*CHOSEN_BY_TORCH, *(canonicalize_name(each.name) for each in gpu)}
    pins = {name: version for name, version in here.items() if name not in chosen}
    with tempfile.TemporaryDirectory() as folder:
        # Names that only the environment at hand needs stay out.
        resolved = resolve(direct_requirements(extras), pins, Path(folder))
    return HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(resolved.items()))


def main() -> int:
    for name, extras in VARIANTS.items():
        (ROOT / "deploy" / name).write_text(constraints(extras))
    return 0


if __name__ == "__main__":
    sys.exit(main())
