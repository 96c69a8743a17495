"""Other people's packages under names of ours: in the folder of a start, and over ours."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from epserve_start.clashes import NAMES, clashes
from tests.deploy.wheel import ROOT

ENTRY_POINTS = ("ctl", "router", "gateway", "prefill_worker", "decode_worker")
PROTO_PLUS = {
    "proto/__init__.py": "raise RuntimeError('somebody else is imported')\n",
    "proto/fields.py": "class Field: pass\n",
    "proto_plus-1.26.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: proto-plus\n"
    "Version: 1.26.1\n",
    "proto_plus-1.26.1.dist-info/RECORD": "proto/__init__.py,,\nproto/fields.py,,\n",
}


def put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def site(wheel: Path, tmp_path: Path) -> Path:
    folder = (tmp_path / "site").resolve()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def start(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of the packages in `site`."""
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(site)}, check=False,
    )  # fmt: skip


def test_the_names_are_those_of_the_wheel() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = document["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.partition(".")[0] for name in packages} == {*NAMES, "epserve_start"}


def test_a_checkout_is_all_ours() -> None:
    assert [*clashes()] == []


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_package_in_the_folder_of_the_start_ends_it(
    site: Path, tmp_path: Path, entry_point: str
) -> None:
    """Whatever is imported first: nothing of it is run."""
    put(tmp_path / "here", {"core/__init__.py": "raise RuntimeError('somebody else')\n"})
    done = start(site, tmp_path / "here", entry_point, "--help")
    assert done.returncode == 1
    assert done.stderr == (
        f"epserve: Python finds {tmp_path}/here/core by the name of our package core, which is "
        f"{site}/core: start in another folder, or install epserve in an environment of its own.\n"
    )


def test_modules_and_packages_are_told_all_and_bare_folders_are_no_packages(
    site: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    put(here, {"model.py": "", "transfer/__init__.py": "", "kernels/notes.txt": ""})
    told = start(site, here, "router", "--help").stderr.splitlines()
    assert [line.split(" by the name")[0] for line in told] == [
        f"epserve: Python finds {here}/model.py", f"epserve: Python finds {here}/transfer",
    ]  # fmt: skip


def test_one_that_is_earlier_on_the_path_is_told_with_its_distribution(
    site: Path, tmp_path: Path
) -> None:
    put(tmp_path / "other", PROTO_PLUS)
    done = start(Path(f"{tmp_path / 'other'}:{site}"), tmp_path, "router", "--help")
    assert done.returncode == 1
    assert f"Python finds {tmp_path}/other/proto (of proto-plus 1.26.1)" in done.stderr


def test_one_that_is_installed_over_ours_ends_the_start(site: Path, tmp_path: Path) -> None:
    put(site, PROTO_PLUS)
    done = start(site, tmp_path, "router", "--help")
    assert done.returncode == 1
    assert done.stderr == (
        f"epserve: our package {site}/proto holds files of another (of proto-plus 1.26.1), such as "
        "fields.py: install epserve in an environment of its own.\n"
    )


def test_one_that_ours_is_installed_over_is_told(site: Path, tmp_path: Path) -> None:
    """Ours is whole, and serves; the other is not."""
    ours = (site / "proto/__init__.py").read_text()
    put(site, PROTO_PLUS)
    put(site, {"proto/__init__.py": ours})
    done = start(site, tmp_path, "ctl", "doctor", "--role", "control", "--output", "json")
    assert done.returncode == 0
    assert done.stderr.startswith(f"epserve: our package {site}/proto holds files of another (of")
    (finding,) = [each for each in json.loads(done.stdout) if each["check"] == "packages"]
    assert finding["state"] == "warning"
    assert "proto-plus 1.26.1" in finding["detail"]


def test_what_an_uninstallation_of_the_other_leaves_is_told(site: Path, tmp_path: Path) -> None:
    (site / "proto/__init__.py").unlink()
    done = start(site, tmp_path, "router", "--help")
    assert done.returncode == 1
    assert f"our package {site}/proto has lost its __init__.py" in done.stderr


def test_a_wheel_alone_is_all_ours(site: Path, tmp_path: Path) -> None:
    """Also when Python has compiled it, and kernels were tuned there."""
    put(site, {"kernels/tuned/NVIDIA_H20.json": "[]", "proto/__pycache__/x.pyc": ""})
    done = start(site, tmp_path, "router", "--help")
    assert (done.returncode, done.stderr) == (0, "")
