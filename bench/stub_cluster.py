"""A router and decode workers without a model: tokens at a set rate, for benchmarks of the gateway.

    python -m bench.stub_cluster --rate 20 --workers 4 --token-ids 70 71 72 73

All streams of a worker get their token at the same tick, as the requests of a batch do; ticks are
multiples of 1 / rate on the machine's monotonic clock, shifted by a part of it from worker to
worker. The first token of a request comes at once. Prints the router's address and serves until
its stdin ends.
"""

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import uvloop

from core.log import configure
from proto import generate_pb2, generate_pb2_grpc, router_pb2, router_pb2_grpc
from proto.generate_pb2 import FINISH_REASON_LENGTH, GenerateRequest, GenerateResponse, Token
from rpc.server import RpcServer

PAGE_TOKENS = 64

Context = grpc.aio.ServicerContext[Any, Any]


class StubDecode(generate_pb2_grpc.DecodeServicer):
    """Every request gets the same token again and again."""

    def __init__(self, *, rate: float, shift_seconds: float, token_id: int) -> None:
        self.num_running = 0
        self._period = 1 / rate
        self._shift = shift_seconds
        self._tick = asyncio.Event()
        self._number = 0
        self._token = Token(token_id=token_id)

    async def run(self) -> None:
        """Ticks until cancelled; one that is late is followed by the next one in time."""
        self._number = int((time.monotonic() - self._shift) / self._period)
        while True:
            # Timers are in milliseconds, and may be early.
            next_at = (self._number + 1) * self._period + self._shift
            while (pause := next_at - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            self._number += 1
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()

    async def Generate(  # noqa: N802 - the name is the contract's
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[GenerateResponse]:
        num_left = request.sampling.max_tokens
        one = GenerateResponse(tokens=[self._token])
        self.num_running += 1
        try:
            seen = self._number
            num_left -= 1
            yield one if num_left else _last(self._token, 1)
            while num_left:
                if seen == self._number:
                    await self._tick.wait()
                # A busy stub loses no tick: what it is late with, it sends at once.
                count = min(num_left, self._number - seen)
                seen, num_left = self._number, num_left - count
                if not num_left:
                    yield _last(self._token, count)
                else:
                    yield one if count == 1 else GenerateResponse(tokens=[self._token] * count)
        finally:
            self.num_running -= 1


def _last(token: Token, count: int) -> GenerateResponse:
    return GenerateResponse(tokens=[token] * count, finish_reason=FINISH_REASON_LENGTH)


class StubRouter(router_pb2_grpc.RouterServicer):
    """Hands out the worker with the fewest requests."""

    def __init__(self, workers: Sequence[tuple[StubDecode, str]], max_model_len: int) -> None:
        self._workers = workers
        self._max_model_len = max_model_len

    async def Assign(  # noqa: N802 - the name is the contract's
        self, request: router_pb2.AssignRequest, context: Context
    ) -> router_pb2.AssignResponse:
        _, address = min(self._workers, key=lambda worker: worker[0].num_running)
        ref = router_pb2.WorkerRef(address=address, epoch=f"epoch-{address}", name=address)
        return router_pb2.AssignResponse(prefill=ref, decode=ref)

    async def Announce(  # noqa: N802 - the name is the contract's
        self, request: router_pb2.AnnounceRequest, context: Context
    ) -> router_pb2.AnnounceResponse:
        return router_pb2.AnnounceResponse(
            page_tokens=PAGE_TOKENS, max_model_len=self._max_model_len, ready=True
        )


async def serve(arguments: argparse.Namespace) -> None:
    workers, servers, ticking = [], [], []
    for index in range(arguments.workers):
        decode = StubDecode(
            rate=arguments.rate,
            shift_seconds=index / arguments.workers / arguments.rate,
            token_id=arguments.token_ids[index % len(arguments.token_ids)],
        )
        server = RpcServer("127.0.0.1:0")
        register = generate_pb2_grpc.add_DecodeServicer_to_server
        server.add(register, decode, generate_pb2, "Decode")
        await server.start()
        workers.append((decode, server.address))
        servers.append(server)
        ticking.append(asyncio.create_task(decode.run()))
    router = RpcServer("127.0.0.1:0")
    router.add(
        router_pb2_grpc.add_RouterServicer_to_server,
        StubRouter(workers, arguments.max_model_len),
        router_pb2,
        "Router",
        multiplexed=("Assign",),
    )
    await router.start()
    sys.stdout.write(f"{router.address}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for task in ticking:
        task.cancel()
    await asyncio.gather(*ticking, return_exceptions=True)
    for server in (router, *servers):
        await server.stop(0)


def without_pauses() -> None:
    """A collection of everything that was ever imported takes as long as ten requests, and would
    count against what is measured."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1000)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.stub_cluster", description=__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--token-ids", type=int, nargs="+", help="of worker 0, 1, ...")
    parser.add_argument("--max-model-len", type=int, default=4096)
    configure("stub", "stub", "warning")  # lines on stdout would fill its pipe
    without_pauses()
    uvloop.run(serve(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
