"""gRPC does nothing around the forks of a gateway's processes."""

import subprocess
import sys

import pytest

SEEN_FIRST = """
import importlib, os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            assert os.environ.get("GRPC_ENABLE_FORK_SUPPORT") == "0", "too late"
            print("in time")

sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize("module", ["gateway.__main__", "gateway.worker"])
def test_said_before_grpc_is_imported(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", SEEN_FIRST, module], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "in time" in done.stdout
