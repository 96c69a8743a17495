"""Clients that a cluster has to bear: too many at once, and such as do not read."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from loadgen.openai_stream import Target, stream
from loadgen.prompts import token_prompts

_COMPLETIONS = "/v1/completions"
_NUM_CROWD = 64
_CROWD_PROMPT_TOKENS, _CROWD_OUTPUT_TOKENS = 512, 1024
_NUM_SLOW = 8
_SLOW_PROMPT_TOKENS, _SLOW_OUTPUT_TOKENS = 32, 2000
_RECEIVE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """Of the gateway at `target`. What becomes of their requests is nobody's concern."""

    target: Target
    model: str
    headers: Mapping[str, str]

    @asynccontextmanager
    async def crowd(self, seed: int) -> AsyncGenerator[None]:
        """More long requests than there is room for, until the end of the block."""
        prompts = token_prompts(seed, _NUM_CROWD, _CROWD_PROMPT_TOKENS)
        bodies = [self._body(prompt, _CROWD_OUTPUT_TOKENS) for prompt in prompts]
        calls = [stream(self.target, _COMPLETIONS, body, self.headers) for body in bodies]
        tasks = [asyncio.create_task(call) for call in calls]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def slow_readers(self, seed: int) -> AsyncGenerator[None]:
        """Long streams of which nothing is read. Raises OSError without a connection, ValueError
        for a gateway that speaks TLS."""
        if self.target.secure:
            raise ValueError("slow readers speak no TLS")
        sockets = []
        try:
            for prompt in token_prompts(seed, _NUM_SLOW, _SLOW_PROMPT_TOKENS):
                client = socket.socket()
                sockets.append(client)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(client, (self.target.host, self.target.port))
                await loop.sock_sendall(client, self._request(prompt))
            yield
        finally:
            for client in sockets:
                client.close()

    def _body(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        fields = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        return {"model": self.model, "prompt": prompt, **fields}

    def _request(self, prompt: list[int]) -> bytes:
        body = json.dumps(self._body(prompt, _SLOW_OUTPUT_TOKENS)).encode()
        lines = [
            f"POST {self.target.path}{_COMPLETIONS} HTTP/1.1",
            f"host: {self.target.host}:{self.target.port}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body
