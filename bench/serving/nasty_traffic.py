"""Requests that leave as much behind as a client can make them, each unlike all others.

For the search of what grows: constraints, names, keys and sessions that are new each time, and
connections that end in every way.
"""

import json
import random
from dataclasses import dataclass
from enum import Enum
from typing import Any

Fields = dict[str, Any]

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize")
WORDS = ("cat", "dog", "house", "river", "stone", "cloud", "bird", "tree")


class Manner(Enum):
    """What becomes of the connection."""

    READ = "read"  # to the end
    ABORTED = "aborted"  # by the client, in the middle of the answer
    HALF_CLOSED = "half-closed"  # behind the request
    CUT = "cut"  # in the middle of the request


@dataclass(frozen=True, slots=True)
class NastyRequest:
    """`data` is all that is sent; `source` the address that it comes from."""

    data: bytes
    manner: Manner
    source: str


class NastyTraffic:
    """The same for the same seed."""

    def __init__(self, seed: int, model: str) -> None:
        self._rng = random.Random(seed)
        self._model = model

    def make(self, previous_id: str | None = None) -> NastyRequest:
        """`previous_id` of a response that is stored, if one is known."""
        rng = self._rng
        path = rng.choice(PATHS)
        manner = rng.choices(list(Manner), (6, 2, 1, 1))[0]
        data = self._head(path) + _chunked(rng, json.dumps(self._body(path, previous_id)).encode())
        if manner is Manner.CUT:
            data = data[: rng.randrange(len(data))]
        source = f"127.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(1, 255)}"
        return NastyRequest(data, manner, source)

    def _head(self, path: str) -> bytes:
        rng = self._rng
        if rng.random() < 0.1:
            path = f"{path}/{self._name()}"
        lines = [
            f"POST {path} HTTP/1.1", "Host: soak", "Content-Type: application/json",
            "Transfer-Encoding: chunked", "Connection: close", f"X-Request-Id: {self._name()}",
            f"Authorization: Bearer {self._name()}", f"X-Session-Id: {self._name()}",
            f"traceparent: 00-{rng.getrandbits(128):032x}-{rng.getrandbits(64):016x}-01",
        ]  # fmt: skip
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def _body(self, path: str, previous_id: str | None) -> Fields:
        rng = self._rng
        model = self._model if rng.random() < 0.95 else self._name()
        text = " ".join([*rng.choices(WORDS, k=rng.randrange(1, 60)), self._name()])
        fields: Fields = {"model": model, "temperature": 1, "stream": rng.random() < 0.5}
        messages = [{"role": "user", "content": text}]
        if path == "/tokenize":
            return {"model": model, "prompt": text}
        if path == "/v1/messages":
            return fields | {"messages": messages, "max_tokens": 16, **self._metadata()}
        if path == "/v1/responses":
            previous = rng.choice((previous_id, previous_id, self._name()))
            fields |= {"input": text, "max_output_tokens": 16, "previous_response_id": previous}
            return fields | {"user": self._name(), "prompt_cache_key": self._name()}
        fields |= {"max_tokens": rng.choice((1, 16, 64)), "user": self._name()}
        fields |= {"prompt": text} if path == "/v1/completions" else {"messages": messages}
        for _ in range(rng.randrange(3)):
            fields |= self._field()
        return fields if rng.random() < 0.5 else fields | self._constraint(path)

    def _name(self) -> str:
        return f"{self._rng.getrandbits(64):x}" * self._rng.choice((1, 1, 1, 12))

    def _metadata(self) -> Fields:
        return {"metadata": {"user_id": self._name()}}

    def _field(self) -> Fields:
        rng = self._rng
        biases = {str(token): rng.uniform(-5, 5) for token in rng.sample(range(7, 768), 300)}
        return rng.choice(
            (
                {"logit_bias": biases},
                {"stop": [self._name() for _ in range(16)]},
                {"stop_token_ids": rng.sample(range(7, 768), 100)},
                {"seed": rng.getrandbits(62)},
                {"n": 4},
                {"frequency_penalty": rng.uniform(-2, 2), "repetition_penalty": 1.2},
                {self._name(): self._name()},
            )
        )

    def _constraint(self, path: str) -> Fields:
        choices: list[Fields] = [
            {"guided_json": self._schema(3)},
            {"guided_regex": self._regex(3)},
            {"guided_grammar": self._grammar()},
            {"guided_choice": [self._name() for _ in range(self._rng.choice((2, 200)))]},
        ]
        if path == "/v1/chat/completions":
            choice = self._rng.choice(("auto", "required"))
            choices.append({"tools": [self._tool() for _ in range(8)], "tool_choice": choice})
        return self._rng.choice(choices)

    def _tool(self) -> Fields:
        properties = {self._name(): self._schema(1) for _ in range(3)}
        parameters = {"type": "object", "properties": properties}
        return {
            "type": "function",
            "function": {"name": self._name()[:60], "parameters": parameters},
        }

    def _schema(self, depth: int) -> Fields:
        rng = self._rng
        if not depth or rng.random() < 0.3:
            return rng.choice(
                (
                    {"type": "string", "maxLength": rng.randrange(1, 300)},
                    {"type": "integer", "minimum": rng.randrange(1000)},
                    {"enum": [self._name() for _ in range(rng.randrange(1, 20))]},
                    {"type": "string", "pattern": f"^{self._regex(1)}$"},
                )
            )
        if rng.random() < 0.3:
            return {"type": "array", "items": self._schema(depth - 1), "maxItems": rng.randrange(9)}
        names = [self._name() for _ in range(rng.randrange(1, 8))]
        properties = {name: self._schema(depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": names[:2]}

    def _regex(self, depth: int) -> str:
        rng = self._rng
        if not depth:
            return rng.choice(("[a-z ]", "[0-9]", ".", "cat", rng.choice(WORDS), "[^x]"))
        parts = [self._regex(depth - 1) for _ in range(rng.randrange(1, 4))]
        most = rng.choice((1, 2, 5, 40))
        return f"({rng.choice(('', '|')).join(parts)}){{1,{most}}}"

    def _grammar(self) -> str:
        rng = self._rng
        rules = [f"r{number}" for number in range(rng.randrange(1, 12))]
        lines = ["root ::= " + " | ".join(rules)]
        for rule in rules:
            follows = rng.choice(("", *rules)) if rng.random() < 0.5 else ""
            lines.append(
                f'{rule} ::= "{self._name()}" | [a-z ]{{1,{rng.randrange(1, 90)}}} {follows}'
            )
        return "\n".join(lines)


def _chunked(rng: random.Random, content: bytes) -> bytes:
    """In pieces, with a trailer."""
    cut = rng.randrange(1, len(content))
    pieces = (f"{len(piece):x}\r\n".encode() + piece for piece in (content[:cut], content[cut:]))
    trailer = f"x-{rng.getrandbits(32):x}: {'a' * rng.randrange(500)}"
    return b"\r\n".join([*pieces, b"0", trailer.encode(), b"", b""])
