"""Processes that make the files of a quantised checkpoint together, a job at a time each.

They end with this one, whatever ends it, and all of them when one fails or is killed.
"""

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from core.errors import CheckpointError
from core.process import die_with_parent
from model.quantize.shard import Job, ShardMaker

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

_STOP_SECONDS = 10.0


class ThisProcess:
    """Does jobs in the order in which they are given."""

    def __init__(self, maker: ShardMaker) -> None:
        self._maker = maker

    def __enter__(self) -> Self:
        self._num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._num_threads)

    def results(self, jobs: deque[Job]) -> Iterator[tuple[Job, str]]:
        """Each job with what came of it, until none is left; more may be added on the way.
        CheckpointError, OSError."""
        while jobs:
            job = jobs.popleft()
            yield job, self._maker.do(job)


class Processes:
    """Does several jobs at once: a process for each of `devices`, which may be named repeatedly."""

    def __init__(self, model: Path, output: Path, devices: Sequence[str]) -> None:
        self._of: dict[Connection, SpawnProcess] = {}
        self._busy: dict[Connection, Job] = {}
        self._arguments = [(model, output, device, os.getpid()) for device in devices]

    def __enter__(self) -> Self:
        # CUDA cannot be used in a fork of a process that has used it.
        context = multiprocessing.get_context("spawn")
        try:
            for arguments in self._arguments:
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, *arguments))
                process.start()
                theirs.close()
                self._of[ours] = process
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._of.values():
            process.kill()
        for connection, process in self._of.items():
            process.join(_STOP_SECONDS)
            connection.close()

    def results(self, jobs: deque[Job]) -> Iterator[tuple[Job, str]]:
        """As of `ThisProcess`, in the order in which they are over."""
        while jobs or self._busy:
            for connection in self._of:
                if jobs and connection not in self._busy:
                    self._send(connection, jobs.popleft())
            ready = wait([*self._busy])
            for connection in [one for one in self._busy if one in ready]:
                answer = self._receive(connection)
                yield self._busy.pop(connection), answer

    def _send(self, connection: Connection, job: Job) -> None:
        self._busy[connection] = job
        try:
            connection.send(job)
        except BrokenPipeError:
            self._fail(connection)

    def _receive(self, connection: Connection) -> str:
        try:
            answer = connection.recv()
        except (EOFError, ConnectionResetError):
            self._fail(connection)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    def _fail(self, connection: Connection) -> None:
        process = self._of[connection]
        process.join(_STOP_SECONDS)
        status = process.exitcode or 0
        ending = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"{status}"
        hint = "; was there too little memory?" if status == -signal.SIGKILL else ""
        raise CheckpointError(
            f"process {process.pid} ended, at {self._busy[connection].shard}: {ending}{hint}"
        )


Makers = ThisProcess | Processes


def _work(jobs: Connection, model: Path, output: Path, device: str, parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which kills us
    torch.set_num_threads(1)
    try:
        maker = ShardMaker(model, output, device)
        while True:
            jobs.send(maker.do(jobs.recv()))
    except EOFError:
        return
    except (CheckpointError, OSError) as error:
        jobs.send(error)
    except Exception:  # noqa: BLE001 - whatever it is, the parent tells it
        jobs.send(CheckpointError(f"a process on {device} failed\n{traceback.format_exc()}"))
