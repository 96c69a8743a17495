"""Foreign packages under the names of ours.

The wheel puts `core`, `model`, `proto` and others beside everybody's packages, and others have such
names too: proto-plus, Hugging Face's kernels, a folder in which somebody calls `python -m gateway`.
Some milliseconds; nothing is imported.
"""

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# As in pyproject.toml.
NAMES = (
    "core", "ctl", "decode_worker", "demo_model", "engine", "ep", "gateway", "kernels", "loadgen",
    "model", "prefill_worker", "proto", "router", "rpc", "transfer",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
_APART = "install epserve in an environment of its own"
_MOST_FILES = 3  # that a sentence names


@dataclass(frozen=True, slots=True)
class Clash:
    """`stops`: what Python imports by that name is not ours."""

    sentence: str
    stops: bool


def clashes(root: Path = ROOT) -> Iterator[Clash]:
    """Those that a process with our packages in `root` meets."""
    installed = _installed(root)
    for name in NAMES:
        found = _location(name)
        if found and found != root / name:
            yield Clash(
                f"Python finds {found}{_owner(found)} by the name of our package {name}, which is "
                f"{root / name}: start in another folder, or {_APART}.",
                stops=True,
            )
        elif found and name in installed:
            yield from _mixed(found, installed[name])


def _location(name: str) -> Path | None:
    """The folder or module that `import name` takes; None for nothing."""
    spec = find_spec(name)
    if spec is None:
        return None
    places = spec.submodule_search_locations or [spec.origin or ""]
    return Path(os.path.realpath(next(iter(places))))


def _mixed(folder: Path, ours: Mapping[str, str]) -> Iterator[Clash]:
    """Where an installer has put files of another package into our folder."""
    there = {entry for entry in os.listdir(folder) if not entry.startswith((".", "__pycache__"))}
    foreign = sorted(there - ours.keys())
    init = folder / "__init__.py"
    is_ours = init.exists() and _digest(init) == ours[init.name]
    if foreign:
        told = f"holds files of another{_owner(folder)}, such as {', '.join(foreign[:_MOST_FILES])}"
    elif init.exists():
        told = "has another's __init__.py"
    else:
        told = "has lost its __init__.py, as when another package of the name is uninstalled"
    if foreign or not is_ours:
        yield Clash(f"our package {folder} {told}: {_APART}.", stops=not is_ours)


def _installed(root: Path) -> dict[str, dict[str, str]]:
    """By package, what the wheel has put into its folder, with digests of files; empty for a
    checkout."""
    found: dict[str, dict[str, str]] = {}
    for record in root.glob("epserve-*.dist-info/RECORD"):
        for line in record.read_text(encoding="utf-8").splitlines():
            path, _, told = line.partition(",")
            name, _, rest = path.partition("/")
            if name in NAMES:
                found.setdefault(name, {})[rest.partition("/")[0]] = told.partition(",")[0]
    return found


def _digest(path: Path) -> str:
    """As a RECORD has it."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def _owner(place: Path) -> str:
    """Of which other distribution, in words; empty where none says that it is its."""
    from importlib.metadata import distributions  # takes its time

    for each in distributions():
        if each.name == "epserve":
            continue
        is_there = os.path.realpath(str(each.locate_file(place.name))) == str(place)
        if is_there and any(file.parts[0] == place.name for file in each.files or ()):
            return f" (of {each.name} {each.version})"
    return ""
