"""What a hostile client sends, made from a seed: the same seed, the same bytes.

Bodies for the HTTP port, raw bytes for any port, and messages that are none for gRPC methods.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from proto import experts_pb2, generate_pb2, router_pb2, worker_pb2

METHODS = tuple(
    f"/{service.full_name}/{method.name}"
    for module in (experts_pb2, generate_pb2, router_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models")
NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**64, -(2**70), 1e308, 0.1, "", "\x00", "\ud800", "a" * 5000,
    "🙂\u202e\x1b[31m", [], [[]], {}, {"": None}, [None] * 50, [0] * 3000, {"a": {"b": [1]}},
)  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "n", "stop",
    "stream", "stream_options", "logprobs", "top_logprobs", "echo", "seed", "user", "logit_bias",
    "tools", "tool_choice", "presence_penalty", "priority", "content", "tokens", "no_such_field",
)  # fmt: skip
LINES = (
    b"Host: x", b"Host: x", b"Host: a, b", b"Host:", b"Content-Length: 5", b"Content-Length: -5",
    b"Content-Length: 99999999999999999999", b"Transfer-Encoding: chunked", b"Expect: 100-continue",
    b"Transfer-Encoding: chunked, gzip", b"Connection: close", b"Connection: upgrade",
    b"Upgrade: h2c", b"Content-Encoding: gzip", b"Origin: null", b"\x00: \x01", b" folded", b": y",
    b"x: " + b"y" * 3000, b"Authorization: Bearer " + b"\xff" * 9, b"a: b\r\n" * 200,
)  # fmt: skip
STARTS = (
    b"GET /health HTTP/1.1", b"GET /health HTTP/1.0", b"GET /health", b"GET /metrics HTTP/1.1",
    b"POST /v1/completions HTTP/1.1", b"POST /tokenize HTTP/1.1", b"HEAD / HTTP/1.1", b"\x16\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT x:1 HTTP/1.1", b"OPTIONS * HTTP/1.1", b"",
    b"GET http://evil.example/ HTTP/1.1", b"GET /%00%ff/../.. HTTP/1.1", b"GET / HTTP/9.9",
)  # fmt: skip
ENDS = (b"", b"\r\n\r\n", b"\r\n\r\nhello", b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"\n\n", b"\r\r")


@dataclass(frozen=True)
class Attack:
    """`pieces` go to a port one after the other, or, with `method`, as requests of it."""

    seed: int
    pieces: tuple[bytes, ...]
    is_half_closed: bool
    is_http: bool
    method: str = ""


def make_attack(seed: int, model: str) -> Attack:
    rng = random.Random(seed)
    kind = rng.choice(("body", "raw", "raw", "grpc"))
    if kind == "grpc":
        # Field number 0 does not exist: no method takes it for a message.
        data = b"\x00" + rng.randbytes(rng.randrange(200))
        return Attack(seed, (data,), is_half_closed=False, is_http=False, method=_method(rng))
    data = _post(rng, model) if kind == "body" else _raw(rng)
    cut = rng.randrange(len(data) + 1) if rng.random() < 0.3 else len(data)
    pieces = (data[:cut], data[cut:])
    return Attack(seed, pieces, is_half_closed=rng.random() < 0.5, is_http=kind == "body")


def _method(rng: random.Random) -> str:
    return rng.choice(METHODS)


def _post(rng: random.Random, model: str) -> bytes:
    body: dict[str, Any] = {"model": model, "max_tokens": 2, "prompt": "a"}
    if rng.random() < 0.5:
        body["messages"] = [{"role": "user", "content": "a"}]
        del body["prompt"]
    for field in rng.sample(FIELDS, rng.randrange(4)):
        body[field] = rng.choice(NASTY)
    content = bytearray(json.dumps(body).encode())
    for _ in range(rng.choice((0, 0, 0, 1, 5))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    head = f"POST {rng.choice(PATHS)} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + bytes(content)


def _raw(rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return rng.randbytes(rng.randrange(2000))
    lines = [rng.choice(STARTS), *rng.choices(LINES, k=rng.randrange(6))]
    data = bytearray(b"\r\n".join(lines) + rng.choice(ENDS))
    for _ in range(rng.choice((0, 0, 1, 10))):
        data.insert(rng.randrange(len(data) + 1), rng.randrange(256))
    return bytes(data) * rng.choice((1, 1, 1, 2, 40))
