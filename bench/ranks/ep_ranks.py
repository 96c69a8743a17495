"""Ranks of an EP group, one process each, that measure together."""

import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from ep.group.group import EpGroup

PATIENCE_SECONDS = 300.0
Program = Callable[..., Any]


def on_all_ranks(
    program: Program, num_ranks: int, *arguments: object, may_share: bool = False
) -> list[Any]:
    """What `program(group, device, *arguments)` returns on each rank, by rank. One GPU a rank, or
    the CPU where there are none; `may_share`: where GPUs are fewer than ranks, which then talk by
    sockets, they share them. Raises what a rank raised."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = multiprocessing.spawn(
        _rank,
        (program, num_ranks, port, results, arguments, may_share),
        nprocs=num_ranks,
        join=False,
        start_method="spawn",
    )
    found: dict[int, Any] = {}
    ended = False
    while len(found) < num_ranks and not ended:
        ended = ranks.join(timeout=0.1)
        while not results.empty():
            rank, value = results.get()
            found[rank] = value
    while not ranks.join():
        pass
    return [found[rank] for rank in range(num_ranks)]


def _rank(
    rank: int,
    program: Program,
    num_ranks: int,
    port: int,
    results: "multiprocessing.SimpleQueue",
    arguments: tuple[Any, ...],
    may_share: bool,
) -> None:
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    shares = may_share and 0 < torch.cuda.device_count() < num_ranks
    index = rank % torch.cuda.device_count() if shares else rank
    device = torch.device("cuda", index) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    group = EpGroup.create(
        rank=rank,
        size=num_ranks,
        rendezvous=f"127.0.0.1:{port}",
        device=device,
        timeout_seconds=PATIENCE_SECONDS,
        backend="sockets" if shares else "auto",
    )
    value = program(group, device, *arguments)
    results.put((rank, value))
    group.exchange([0])
    group.close()
    sys.stdout.flush()
