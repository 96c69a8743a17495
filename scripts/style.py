"""House rules that no linter knows: sizes of files and functions, names, empty packages."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# A Triton kernel with its launcher, and a test that tells a whole story, may be longer.
MAX_KERNEL_LINES = 150
MAX_TEST_LINES = 100
FORBIDDEN_NAMES = ("utils", "helper", "common", "misc", "manager")
FORBIDDEN_TEXT = ("TO" + "DO", "FIX" + "ME", "Not" + "ImplementedError")


def tracked_python() -> list[Path]:
    """Hand-written Python files that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [Path(name) for name in listed if "_pb2" not in name and Path(name).exists()]


def max_function_lines(path: Path) -> int:
    if path.parts[0] == "kernels":
        return MAX_KERNEL_LINES
    return MAX_TEST_LINES if path.parts[0] == "tests" else MAX_FUNCTION_LINES


def _does_something(statement: ast.stmt) -> bool:
    return not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def complaints(path: Path) -> Iterator[str]:
    """What is wrong with one file, as `path:line: reason`."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if path.name == "__init__.py" and any(map(_does_something, ast.parse(text).body)):
        yield f"{path}:1: an __init__.py holds a docstring at most"
    if len(lines) > MAX_FILE_LINES:
        yield f"{path}:1: {len(lines)} lines, at most {MAX_FILE_LINES}"
    if any(word in path.stem.lower() for word in FORBIDDEN_NAMES):
        yield f"{path}:1: the file's name says nothing"
    for number, line in enumerate(lines, start=1):
        for word in FORBIDDEN_TEXT:
            if word in line:
                yield f"{path}:{number}: {word}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and any(
            word in node.name.lower() for word in FORBIDDEN_NAMES
        ):
            yield f"{path}:{node.lineno}: the name of class {node.name} says nothing"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > max_function_lines(path):
                yield f"{path}:{node.lineno}: {node.name} has {size} lines"


def main() -> int:
    found = [complaint for path in tracked_python() for complaint in complaints(path)]
    for complaint in found:
        print(complaint)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
