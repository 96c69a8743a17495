"""What `pip install epserve` brings, and what only a clone of the repository has."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from tests.deploy.wheel import ROOT, build_wheel, tracked


def test_the_wheel_holds_the_product_and_nothing_else(installed: Path) -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = document["tool"]["setuptools"]["packages"]["find"]["include"]
    tops = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert tops == {name for name in packages if "." not in name}
    assert not tops & {"bench", "scripts", "tests"}
    assert not (installed / "demo_model/training").exists()


def test_all_modules_and_files_of_the_product_are_in_it(installed: Path) -> None:
    suffixes = {".py", ".cu", ".cuh", ".proto", ".json", ".safetensors"}
    wanted = [
        path
        for path in tracked(*(path.name for path in installed.iterdir()))
        if path.suffix in suffixes and path.parts[:2] != ("demo_model", "training")
    ]
    assert len([path for path in wanted if path.suffix == ".cu"]) > 5
    assert len([path for path in wanted if path.suffix == ".safetensors"]) == 2
    assert [path for path in wanted if not (installed / path).is_file()] == []


def test_ctl_bench_needs_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    """Nothing that only a clone has is imported."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('bench', 'demo_model.training')))\n"
        "import loadgen.load; print(loadgen.load.__file__)\n"
        "from typer.testing import CliRunner; from ctl.main import app\n"
        "arguments = ['bench', '--url', 'http://127.0.0.1:1', '--model', 'm']\n"
        "result = CliRunner().invoke(app, arguments)\n"
        "print(result.exit_code, '32 errors' in result.output)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(installed)}, check=False,
    )  # fmt: skip
    expected = [str(installed / "loadgen/load.py"), "1 True"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_the_benchmarks_are_a_distribution_of_their_own(clone: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(clone / "bench", tmp_path)) as archive:
        found = {name for name in archive.namelist() if name.startswith("bench/")}
    assert found == {str(path) for path in tracked("bench")} - {"bench/pyproject.toml"}
