"""deploy/constraints.txt: the version of everything that the image may install.

python scripts/pin_dependencies.py           # writes the file; asks the package index

Versions are those of this environment, so run it in one that the tests have passed in. What only a
CUDA build of torch brings is not installed here: pip resolves it for the image's Python.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
# Extras that the image has (see deploy/Dockerfile), and what builds epserve itself.
EXTRAS = ("kubernetes", "tracing")
BUILD = ("setuptools",)
IMAGE_PYTHON = "3.12"
# A CUDA build of torch asks for one version of it; a CPU build for none.
CHOSEN_BY_TORCH = ("triton",)

HEADER = """# What the image may install. Made by scripts/pin_dependencies.py; do not edit.
"""


def direct_requirements() -> list[Requirement]:
    """What pyproject.toml asks for, the image's extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    texts = [*project["dependencies"], *BUILD]
    for extra in EXTRAS:
        texts += optional.get(extra, [])
    return [Requirement(text) for text in texts]


def installed() -> dict[str, str]:
    """Versions of all that the requirements lead to in this environment, by canonical name."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    pending = direct_requirements()
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


def resolve(pins: dict[str, str], folder: Path) -> dict[str, str]:
    """What pip would install into the image, by canonical name. Installs nothing."""
    pinned = folder / "constraints.txt"
    pinned.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
    report = folder / "report.json"
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
            "--only-binary=:all:", "--python-version", IMAGE_PYTHON,
            "--target", str(folder), "--report", str(report), "--constraint", str(pinned),
            *map(str, direct_requirements()),
        ],
        check=True,
    )  # fmt: skip
    chosen = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {canonicalize_name(each["name"]): each["version"].partition("+")[0] for each in chosen}


def main() -> int:
    pins = {name: v for name, v in installed().items() if name not in CHOSEN_BY_TORCH}
    with tempfile.TemporaryDirectory() as folder:
        # Names that only the environment at hand needs stay out.
        resolved = resolve(pins, Path(folder))
    lines = [f"{name}=={version}\n" for name, version in sorted(resolved.items())]
    CONSTRAINTS.write_text(HEADER + "".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
