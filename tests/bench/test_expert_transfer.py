"""Experts of a bench that move between real ranks, by gloo or NCCL, are where they should be."""

import pytest
import torch

from bench import expert_transfer


@pytest.mark.slow
def test_on_the_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layers", "3", "--slots", "4", "--expert-bytes", "65536"]
    assert expert_transfer.main(["--ranks", "2", *sizes]) == 0
    assert "GB/s" in capfd.readouterr().out


@pytest.mark.gpu
def test_between_gpus(capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert expert_transfer.main(["--ranks", "2", "--layers", "4"]) == 0
    assert "GB/s" in capfd.readouterr().out
