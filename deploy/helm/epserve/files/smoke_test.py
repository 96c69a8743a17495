"""Asks a gateway for a short reply until it gives one: the test of a release.

python smoke_test.py http://GATEWAY --model NAME [--api-keys-file FILE] [--timeout-seconds N]

Needs nothing but Python. Exit status 0 after a streamed and a whole reply, 1 otherwise.
"""

import argparse
import http.client
import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAUSE_SECONDS = 2.0
ANSWER_SECONDS = 60.0


def post(url: str, key: str, body: dict[str, Any]) -> Iterator[bytes]:
    """Lines of the reply. Raises OSError, which an HTTP error status is as well."""
    request = urllib.request.Request(url, json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    # The certificate names the gateway as clients know it, not its Service.
    context = ssl._create_unverified_context() if url.startswith("https:") else None
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS, context=context) as reply:
        yield from reply


def check(base: str, model: str, key: str) -> str:
    """The text of a reply, the same streamed and whole. Raises OSError, HTTPException, ValueError
    or LookupError."""
    url = f"{base}/v1/completions"
    body = {"model": model, "prompt": "Hello", "max_tokens": 4, "temperature": 0}
    whole = json.loads(b"".join(post(url, key, body)))
    text: str = whole["choices"][0]["text"]
    lines = post(url, key, body | {"stream": True})
    events = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        raise ValueError("the stream did not end with [DONE]")
    pieces = [json.loads(event)["choices"] for event in events[:-1]]
    streamed = "".join(choices[0]["text"] for choices in pieces if choices)
    if streamed != text:
        raise ValueError(f"streamed {streamed!r}, but the whole reply is {text!r}")
    return text


def first_key(path: Path | None) -> str:
    """The first API key of a file with `KEY [name=value] ...` lines, which a hash is not; empty
    without a file. Raises ValueError for one without such a key."""
    if path is None:
        return ""
    firsts = [(line.split() or ["#"])[0] for line in path.read_text().splitlines()]
    keys = [first for first in firsts if not first.startswith(("#", "sha256:"))]
    if not keys:
        raise ValueError(f"{path} has no key to ask with: a hash lets nobody in")
    return keys[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="Asks a gateway for a short reply.")
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-keys-file", type=Path)
    parser.add_argument("--timeout-seconds", type=float, default=120.0)
    options = parser.parse_args()
    try:
        key = first_key(options.api_keys_file)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"failed: {error}\n")
        return 1
    deadline = time.monotonic() + options.timeout_seconds
    while True:
        try:
            text = check(options.url.rstrip("/"), options.model, key)
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            # A wrong key or name does not get right by waiting.
            final = isinstance(error, urllib.error.HTTPError) and error.code in (400, 401, 404)
            if final or time.monotonic() > deadline:
                sys.stderr.write(f"failed: {error}\n")
                return 1
            sys.stderr.write(f"not yet: {error}\n")
            time.sleep(PAUSE_SECONDS)
        else:
            sys.stdout.write(f"{options.model} says {text!r}\n")
            return 0


if __name__ == "__main__":
    sys.exit(main())
