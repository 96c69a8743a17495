"""Programs on several GPUs, a process each."""

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

import torch

from ep.group.group import EpGroup
from tests.ep.rank_pool import free_port

PATIENCE_SECONDS = 120.0
Program = Callable[[EpGroup, torch.device], None]


def on_gpus(size: int, program: Program) -> None:
    """`program(group, device)` on each of `size` GPUs, over NCCL; an AssertionError with the trace
    of the first that fails. The program is a function of a module."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    address = f"127.0.0.1:{free_port()}"
    processes = [
        context.Process(target=_run, args=(rank, size, address, program, results), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            trace = results.get(timeout=PATIENCE_SECONDS)
            assert not trace, trace
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
            process.join()


def _run(rank: int, size: int, address: str, program: Program, results: Any) -> None:
    device = torch.device("cuda", rank)
    try:
        torch.cuda.set_device(device)
        group = EpGroup.create(
            rank=rank, size=size, rendezvous=address, device=device,
            timeout_seconds=PATIENCE_SECONDS,
        )  # fmt: skip
        program(group, device)
        torch.cuda.synchronize()
        group.exchange([rank])  # nobody leaves while others are at work
        results.put("")
    except Exception:  # noqa: BLE001 - told to the test
        results.put(f"rank {rank}:\n{traceback.format_exc()}")
