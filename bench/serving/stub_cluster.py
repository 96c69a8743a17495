"""A router and decode workers without a model: tokens at a set rate, for benchmarks of the gateway.

    python -m bench.serving.stub_cluster --rate 20 --workers 4 --token-ids 70 71 72 73

All streams of a worker get their token at the same tick, as the requests of a batch do; ticks are
multiples of 1 / rate on the machine's monotonic clock, shifted by a part of it from worker to
worker. The first token of a request comes at once. Prints the router's address and serves until
its stdin ends. With --tls-cert and --tls-key it asks its callers for the same certificate.
"""

import argparse
import asyncio
import gc
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.serving.stub_server import Method, OnMessage, Send, StubServer, unary
from core.log import configure
from proto.generate_pb2 import FINISH_REASON_LENGTH, GenerateRequest, GenerateResponse, Token
from proto.multiplex_pb2 import CallEnd, CallPiece, ClientFrame, OpenCall, ServerFrame
from proto.router_pb2 import AnnounceResponse, AssignResponse, WorkerRef
from rpc.multiplex_server import MAX_UNREAD_FRAMES, MAX_UNREAD_PIECES, MAX_UNREAD_SMALL_FRAMES

PAGE_TOKENS = 64
SESSION = "/epserve.rpc.v1.Multiplex/Session"
ANNOUNCE = "/epserve.router.v1.Router/Announce"
STREAMING = frozenset({SESSION})

OK = CallEnd(code="OK")
LAST = GenerateResponse(finish_reason=FINISH_REASON_LENGTH).SerializeToString()


@dataclass(slots=True)
class _Stream:
    """Tokens of one request: those still to come, and those that wait to be sent."""

    num_left: int
    num_waiting: int = 0


class Session:
    """One multiplexed stream: `begin` answers a call now, or None and it is fed by `tick`."""

    def __init__(
        self, send: Send, begin: "Callable[[OpenCall], bytes | _Stream]", token: bytes
    ) -> None:
        self.streams: dict[int, _Stream] = {}
        self._send = send
        self._begin = begin
        self._token = token
        self._answers: list[CallPiece] = []
        self._unread: deque[int] = deque()  # pieces of each frame on its way
        self._num_unread_pieces = 0

    def on_message(self, content: bytes) -> None:
        frame = ClientFrame.FromString(content)
        for _ in range(min(frame.num_read, len(self._unread))):
            self._num_unread_pieces -= self._unread.popleft()
        for opened in frame.open:
            answer = self._begin(opened)
            if isinstance(answer, _Stream):
                self.streams[opened.call] = answer
                self._add(answer, 1)
            else:
                self._answers.append(CallPiece(call=opened.call, responses=answer, end=OK))
        for call in frame.cancel:
            self.streams.pop(call, None)
        self._flush()

    def tick(self, count: int) -> None:
        """So many tokens more for each stream."""
        for stream in self.streams.values():
            self._add(stream, count)
        self._flush()

    def _add(self, stream: _Stream, count: int) -> None:
        count = min(count, stream.num_left)
        stream.num_left -= count
        stream.num_waiting += count

    def _flush(self) -> None:
        """Everything that waits, in one frame; nothing while the peer is late with reading."""
        num_frames = len(self._unread)
        if num_frames >= MAX_UNREAD_SMALL_FRAMES or (
            num_frames >= MAX_UNREAD_FRAMES and self._num_unread_pieces >= MAX_UNREAD_PIECES
        ):
            return
        pieces, self._answers = self._answers, []
        ended = []
        for call, stream in self.streams.items():
            if not stream.num_waiting:
                continue
            responses = self._token * stream.num_waiting
            stream.num_waiting = 0
            if stream.num_left:
                pieces.append(CallPiece(call=call, responses=responses))
            else:
                pieces.append(CallPiece(call=call, responses=responses + LAST, end=OK))
                ended.append(call)
        for call in ended:
            del self.streams[call]
        if pieces:
            self._unread.append(len(pieces))
            self._num_unread_pieces += len(pieces)
            self._send(ServerFrame(pieces=pieces).SerializeToString())


class StubDecode:
    """Every request gets the same token again and again."""

    def __init__(self, *, rate: float, shift_seconds: float, token_id: int) -> None:
        self._sessions: list[Session] = []
        self._period = 1 / rate
        self._shift = shift_seconds
        self._token = GenerateResponse(tokens=[Token(token_id=token_id)]).SerializeToString()

    @property
    def num_running(self) -> int:
        return sum(len(session.streams) for session in self._sessions)

    async def run(self) -> None:
        """Ticks until cancelled; a busy stub loses none: what it is late with, it sends at once."""
        seen = int((time.monotonic() - self._shift) / self._period)
        while True:
            # Timers are in milliseconds, and may be early.
            next_at = (seen + 1) * self._period + self._shift
            while (pause := next_at - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            number = int((time.monotonic() - self._shift) / self._period)
            for session in self._sessions:
                session.tick(max(1, number - seen))
            seen = max(number, seen + 1)

    def session(self, send: Send) -> OnMessage:
        """The gateway's calls of Generate."""

        def begin(opened: OpenCall) -> _Stream:
            request = GenerateRequest.FromString(opened.request)
            return _Stream(request.sampling.max_tokens)

        session = Session(send, begin, self._token)
        self._sessions.append(session)
        return session.on_message


def router_session(workers: Sequence[tuple[StubDecode, str]]) -> Method:
    """The gateway's calls of Assign: hands out the worker with the fewest requests."""

    def begin(opened: OpenCall) -> bytes:
        _, address = min(workers, key=lambda worker: worker[0].num_running)
        ref = WorkerRef(address=address, epoch=f"epoch-{address}", name=address)
        return AssignResponse(prefill=ref, decode=ref).SerializeToString()

    return lambda send: Session(send, begin, b"").on_message


def mutual_tls(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Of a server whose clients show the same certificate; None without one."""
    if cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=cert)
    context.load_cert_chain(cert, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    return context


async def serve(arguments: argparse.Namespace) -> None:
    workers, servers, ticking = [], [], []
    tls = mutual_tls(arguments.tls_cert, arguments.tls_key)
    for index in range(arguments.workers):
        decode = StubDecode(
            rate=arguments.rate,
            shift_seconds=index / arguments.workers / arguments.rate,
            token_id=arguments.token_ids[index % len(arguments.token_ids)],
        )
        server, address = await StubServer.listen(
            {SESSION: decode.session}, streaming=STREAMING, tls=tls
        )
        workers.append((decode, address))
        servers.append(server)
        ticking.append(asyncio.create_task(decode.run()))
    answer = AnnounceResponse(
        page_tokens=PAGE_TOKENS, max_model_len=arguments.max_model_len, ready=True
    ).SerializeToString()
    methods = {SESSION: router_session(workers), ANNOUNCE: unary(lambda: answer)}
    router, address = await StubServer.listen(methods, streaming=STREAMING, tls=tls)
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for task in ticking:
        task.cancel()
    await asyncio.gather(*ticking, return_exceptions=True)
    for server in (router, *servers):
        server.close()


def without_pauses() -> None:
    """A collection of everything that was ever imported takes as long as ten requests, and would
    count against what is measured."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1000)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.serving.stub_cluster", description=__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--token-ids", type=int, nargs="+", help="of worker 0, 1, ...")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--tls-cert", type=Path)
    parser.add_argument("--tls-key", type=Path)
    configure("stub", "stub", "warning")  # lines on stdout would fill its pipe
    without_pauses()
    uvloop.run(serve(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
