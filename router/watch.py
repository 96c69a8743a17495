"""Following one worker: a WatchStatus stream, opened again whenever it ends."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from core.log import get_logger
from proto.worker_pb2 import Role, WatchStatusRequest, WorkerStatus
from proto.worker_pb2_grpc import WorkerStub
from router.table import StatusArrived, StreamBroken
from router.worker import role_name
from rpc.client import channel

log = get_logger("router.watch")

FIRST_BACKOFF_SECONDS = 0.05
# Processes that start together find one another sooner.
UNREACHABLE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """`silence_seconds` without a message mean death; attempts to reach a worker are at most
    `max_backoff_seconds` apart."""

    status_interval_ms: int
    silence_seconds: float
    max_backoff_seconds: float


async def watch_worker(
    address: str,
    role: Role.ValueType,
    report: Callable[[StatusArrived | StreamBroken], None],
    limits: WatchLimits,
) -> None:
    """Reports what the worker at `address` says and when its stream breaks; until cancelled.

    Of a worker that was never heard nothing is in the table: the log tells that it is not reached.
    """
    loop = asyncio.get_running_loop()
    backoff = FIRST_BACKOFF_SECONDS
    silent_since, is_told = loop.time(), False
    while True:
        num_heard = 0

        def hear(event: StatusArrived) -> None:
            nonlocal num_heard
            num_heard += 1
            report(event)

        reason = await _follow(address, role, hear, limits)
        report(StreamBroken(address, reason))
        if num_heard:
            silent_since, is_told = loop.time(), False
        elif not is_told and loop.time() - silent_since >= UNREACHABLE_SECONDS:
            is_told = True
            log.warning(
                "worker cannot be reached",
                worker_role=role_name(role),
                address=address,
                reason=reason,
            )
        backoff = FIRST_BACKOFF_SECONDS if num_heard else backoff * 2
        await asyncio.sleep(min(backoff, limits.max_backoff_seconds))


async def _follow(
    address: str,
    role: Role.ValueType,
    report: Callable[[StatusArrived], None],
    limits: WatchLimits,
) -> str:
    """One stream until it ends; returns why it did."""
    # A fresh channel each time: the back-off is ours alone, and so is the name look-up.
    async with channel(address) as peer:
        request = WatchStatusRequest(min_interval_ms=limits.status_interval_ms)
        stream = WorkerStub(peer).WatchStatus(request)
        try:
            while True:
                async with asyncio.timeout(limits.silence_seconds):
                    status = await stream.read()
                if not isinstance(status, WorkerStatus):
                    return "its status stream ended"
                report(StatusArrived(address, role, status))
        except TimeoutError:
            return f"it was silent for {limits.silence_seconds:g} s"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            stream.cancel()
