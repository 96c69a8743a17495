"""A container's first process that is stopped before it has handlers of its own."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def has_namespaces() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not has_namespaces(), reason="may make no PID namespace here")
def test_it_leaves() -> None:
    code = "import core.first_process, time; print('up', flush=True); time.sleep(300)"
    with subprocess.Popen(
        [*NAMESPACE, sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as outside:
        try:
            assert outside.stdout is not None
            assert outside.stdout.readline() == b"up\n"
            (first,) = psutil.Process(outside.pid).children()
            first.send_signal(signal.SIGTERM)
            assert outside.wait(30) == 128 + signal.SIGTERM
        finally:
            outside.kill()


@pytest.mark.parametrize("role", ["gateway", "router", "prefill_worker", "decode_worker"])
def test_it_is_imported_first(role: str) -> None:
    """But for what comes with Python, and a check of milliseconds that no package is another's."""
    tree = ast.parse((REPOSITORY / role / "__main__.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [
        node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in imports
    ]
    ours = [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]
    assert ours[:2] == ["epserve_start.check", "core.first_process"]
