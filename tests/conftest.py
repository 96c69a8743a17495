"""Settings that every test shares."""

import os
import random
import shutil
import sys
from importlib.util import find_spec

import pytest

# One thread a process: the machine that tests is small and the numbers must not depend on it.
# Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU the Triton kernels run in Triton's interpreter, which must be said before anything
# imports it.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")


if find_spec("hypothesis") is not None:  # a machine with a GPU may do without
    from hypothesis import HealthCheck, settings

    # The same examples each time, however long the machine takes for one.
    settings.register_profile(
        "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("tests")


def has_cuda() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_runtest_setup() -> None:
    """The same random numbers and threads, whichever tests ran before: some start a whole rank."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none; torch is only asked if needed."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
