"""The other side of a transfer under test: in this process (memory) or in one of its own."""

import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec
import torch

from tests.transfer.memory import MemoryTransfer
from transfer.api import AgentDescriptor, Notification, Transfer

PATIENCE_SECONDS = 10.0
START_SECONDS = 60.0


class Check(msgspec.Struct, frozen=True):
    """A message that says what must lie in the receiver's buffer when it arrives."""

    index: int
    offset: int
    num_bytes: int
    digest: bytes


class FarEnd(Protocol):
    descriptor: AgentDescriptor

    def read(self) -> bytes:
        """The whole buffer."""

    def receive(self, count: int) -> list[Notification]:
        """The next `count` notifications."""

    def bad_checks(self) -> list[int]:
        """Indices of `Check` messages whose bytes were not there on arrival."""

    def kill(self) -> None:
        """Ends it without a farewell."""


def landed(check: Check, buffer: torch.Tensor) -> bool:
    data = buffer[check.offset : check.offset + check.num_bytes].numpy().tobytes()
    return hashlib.blake2b(data).digest() == check.digest


def collect(
    transfer: Transfer, buffer: torch.Tensor, arrived: list[Notification], bad: list[int]
) -> None:
    """Takes in what has arrived and checks the messages that want it."""
    for notification in transfer.notifications():
        arrived.append(notification)
        if notification.message.startswith(b"check"):
            check = msgspec.msgpack.decode(notification.message[5:], type=Check)
            if not landed(check, buffer):
                bad.append(check.index)


class MemoryFarEnd:
    def __init__(self, name: str, num_bytes: int) -> None:
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.transfer = MemoryTransfer(name)
        self.transfer.register(self.buffer)
        self.descriptor = self.transfer.describe()
        self._arrived: list[Notification] = []
        self._bad: list[int] = []

    def read(self) -> bytes:
        return self.buffer.numpy().tobytes()

    def receive(self, count: int) -> list[Notification]:
        collect(self.transfer, self.buffer, self._arrived, self._bad)
        assert len(self._arrived) >= count
        taken, self._arrived = self._arrived[:count], self._arrived[count:]
        return taken

    def bad_checks(self) -> list[int]:
        return self._bad

    def kill(self) -> None:
        self.transfer.kill()


class NixlFarEnd:
    """A real process; `pause` keeps it from making progress until the next command."""

    def __init__(self, name: str, num_bytes: int) -> None:
        # Forked from one process that has imported torch, with the variables of this moment.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, its_pipe = context.Pipe()
        self.process = context.Process(
            target=serve, args=(its_pipe, name, num_bytes, dict(os.environ)), daemon=True
        )
        self.process.start()
        its_pipe.close()
        self.descriptor: AgentDescriptor = self._answer(START_SECONDS)

    def read(self) -> bytes:
        return self._ask("read")

    def receive(self, count: int) -> list[Notification]:
        return self._ask("receive", count)

    def bad_checks(self) -> list[int]:
        return self._ask("bad_checks")

    def pause(self) -> None:
        self._ask("pause")

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_SECONDS)

    def _ask(self, *command: object) -> object:
        self._pipe.send(command)
        return self._answer()

    def _answer(self, seconds: float = 2 * PATIENCE_SECONDS) -> object:
        assert self._pipe.poll(seconds), "the far end does not answer"
        return self._pipe.recv()


def serve(pipe: Connection, name: str, num_bytes: int, environment: dict[str, str]) -> None:
    """The process: receives all the time, answers commands, until the test is gone."""
    os.environ.clear()
    os.environ.update(environment)
    from transfer.nixl_agent import NixlTransfer

    torch.set_num_threads(1)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    transfer = NixlTransfer(name)
    transfer.register(buffer)
    pipe.send(transfer.describe())
    arrived: list[Notification] = []
    bad: list[int] = []
    while True:
        collect(transfer, buffer, arrived, bad)
        if not pipe.poll(0.0002):
            continue
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            return
        if command == "read":
            pipe.send(buffer.numpy().tobytes())
        elif command == "bad_checks":
            pipe.send(bad)
        elif command == "pause":
            pipe.send(None)
            pipe.poll(None)
        elif command == "receive":
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len(arrived) < arguments[0] and time.monotonic() < deadline:
                collect(transfer, buffer, arrived, bad)
            pipe.send(arrived[: arguments[0]])
            del arrived[: arguments[0]]


MakeFarEnd = Callable[[str], FarEnd]
