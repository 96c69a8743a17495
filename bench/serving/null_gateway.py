"""A gateway that does nothing: the same HTTP server answers each POST at once with one token.

What a request takes here is the floor of `bench.gateway_load`: client, sockets, HTTP, and the
noise of the machine.

    python -m bench.serving.null_gateway --listen 127.0.0.1:8000
"""

import argparse
import sys

import uvicorn
from starlette.types import Receive, Scope, Send

from bench.serving.stub_cluster import without_pauses
from core.address import parse_address
from gateway.http.http_protocol import HttpProtocol
from gateway.http.reply_sender import STREAM_HEADERS
from gateway.replies.reply_form import SSE_DONE, sse_event

TOKEN = sse_event(b'{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}')


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body and sends a stream of one token."""
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    await send({"type": "http.response.body", "body": TOKEN, "more_body": True})
    await send({"type": "http.response.body", "body": SSE_DONE, "more_body": False})


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.serving.null_gateway", description=__doc__)
    parser.add_argument("--listen", type=parse_address, required=True)
    address = parser.parse_args(argv).listen
    without_pauses()
    uvicorn.run(
        answer, host=address.host, port=address.port, http=HttpProtocol, loop="uvloop", ws="none",
        lifespan="off", log_config=None, access_log=False,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
