"""Real processes that form one EP group after another and run programs in it."""

import faulthandler
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from ep.group.group import EpGroup
from tests.free_ports import free_port

IMPORT_SECONDS = 100.0  # torch, four times at once, on a machine that may be busy
PATIENCE_SECONDS = 50.0
Program = Callable[..., object]


class RankPool:
    def __init__(self, num_processes: int) -> None:
        # All are forked from one process that has imported torch, and started nothing.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.processes = []
        self.pipes: list[Connection] = []
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        for pipe in self.pipes:
            assert pipe.poll(IMPORT_SECONDS), "the processes do not start"
            pipe.recv()

    def start(self, program: Program, size: int, *arguments: object, backend: str) -> None:
        """Runs `program(group, *arguments)` on a new group of the first `size` processes."""
        rendezvous = f"127.0.0.1:{free_port()}"
        for rank in range(size):
            self.pipes[rank].send((program, rank, size, rendezvous, backend, arguments))

    def result(self, rank: int, seconds: float) -> object:
        """What the program returned; an AssertionError with its trace when it raised."""
        if not self.pipes[rank].poll(seconds):
            for process in self.processes:
                os.kill(process.pid or 0, signal.SIGUSR1)  # each prints where it is
            raise AssertionError(f"rank {rank} is not done after {seconds} s")
        succeeded, value = self.pipes[rank].recv()
        assert succeeded, value
        return value

    def run(
        self,
        program: Program,
        size: int,
        *arguments: object,
        backend: str = "auto",
        seconds: float = PATIENCE_SECONDS,
    ) -> list[object]:
        self.start(program, size, *arguments, backend=backend)
        return [self.result(rank, seconds) for rank in range(size)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    pipe.send("ready")
    while True:
        try:
            program, rank, size, rendezvous, backend, arguments = pipe.recv()
        except EOFError:  # the test is gone
            return
        try:
            group = EpGroup.create(
                rank=rank,
                size=size,
                rendezvous=rendezvous,
                device=torch.device("cpu"),
                timeout_seconds=PATIENCE_SECONDS,
                silence_seconds=PATIENCE_SECONDS,
                backend=backend,
            )
            value = program(group, *arguments)
            group.close()
            pipe.send((True, value))
        except Exception:  # noqa: BLE001 - reported to the test
            pipe.send((False, traceback.format_exc()))
