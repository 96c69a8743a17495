"""An API server for pods, as far as listing and watching goes, after the documented protocol:
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes

A real HTTP/1.1 server with chunked watches. `Trouble` makes it do what real ones (and what is
between them and the client) sometimes do, and some things that they promise not to.
"""

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

Pod = dict[str, Any]


@dataclass(slots=True)
class Trouble:
    """Chances, each of one event or one request."""

    doubled: float = 0.0
    reordered: float = 0.0
    missed: float = 0.0
    cut: float = 0.0
    refused: float = 0.0
    gone: float = 0.0
    nonsense: float = 0.0


@dataclass(slots=True)
class Refusal:
    status: int
    message: str
    headers: dict[str, str] = field(default_factory=dict)


class FakeKubernetes:
    """Use it as an async context manager. Resource versions are opaque: no order can be read
    from them, and only this server knows what they mean."""

    def __init__(self, *, namespace: str = "default", seed: int = 0) -> None:
        self.namespace = namespace
        self.trouble = Trouble()
        self.refusal: Refusal | None = None
        self.hangs = False
        self.requests: list[dict[str, str]] = []
        self.authorizations: set[str] = set()
        self.pods: dict[str, Pod] = {}
        self._chance = random.Random(seed)
        self._log: list[tuple[str, Pod, Pod | None]] = []  # kind, object, object before
        self._oldest = 0
        self._positions: dict[str, int] = {}
        self._num_uids = 0
        self._changed = asyncio.Event()
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def num_watches(self) -> int:
        return sum(_is_true(request, "watch") for request in self.requests)

    @property
    def num_lists(self) -> int:
        return len(self.requests) - self.num_watches

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        self.drop_connections()
        await self._server.wait_closed()

    def drop_connections(self) -> None:
        """As a load balancer or a crash would."""
        for writer, task in self._connections.items():
            writer.transport.abort()
            if task is not None:
                task.cancel()

    def compact(self) -> None:
        """Versions up to now are gone."""
        self._oldest = len(self._log)

    # ---- changes

    def create(
        self,
        name: str,
        *,
        ip: str = "",
        role: str = "decode",
        port: int = 0,
        ready: bool = False,
        **metadata: Any,
    ) -> Pod:
        self._num_uids += 1
        # As random as real ones are: their order tells nothing.
        uid = f"{self._chance.getrandbits(32):08x}-{self._num_uids}"
        ports = [{"name": "metrics", "containerPort": 9}]
        if port:
            ports.append({"name": "grpc", "containerPort": port})
        pod = {
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "uid": uid,
                # Many pods share a second.
                "creationTimestamp": f"2026-01-01T00:00:{self._num_uids // 8 % 60:02}Z",
                "labels": {"epserve.io/role": role, "app": "epserve"},
                **metadata,
            },
            "spec": {"containers": [{"name": "sidecar"}, {"name": "worker", "ports": ports}]},
            "status": _status(ip, ready=ready),
        }
        self._record("ADDED", pod, None)
        return pod

    def modify(self, name: str, *, ip: str | None = None, ready: bool | None = None) -> None:
        def change(pod: Pod) -> None:
            was = pod["status"]
            now_ready = ready if ready is not None else was["conditions"][0]["status"] == "True"
            pod["status"] = _status(ip or was.get("podIP", ""), ready=now_ready)

        self._modify(name, change)

    def finish(self, name: str, phase: str) -> None:
        self._modify(name, lambda pod: pod["status"].update(phase=phase))

    def terminate(self, name: str) -> None:
        """What a delete does at first."""
        stamp = "2026-01-02T00:00:00Z"
        self._modify(name, lambda pod: pod["metadata"].update(deletionTimestamp=stamp))

    def relabel(self, name: str, **labels: str) -> None:
        self._modify(name, lambda pod: pod["metadata"]["labels"].update(labels))

    def delete(self, name: str) -> None:
        """Gone from the API, as after the grace or by force."""
        pod = _copy(self.pods[name])
        self._record("DELETED", pod, pod)

    def forget(self, name: str) -> None:
        """Deleted without an event, as if it had been lost."""
        del self.pods[name]

    def _modify(self, name: str, change: Any) -> None:
        before = self.pods[name]
        pod = _copy(before)
        change(pod)
        self._record("MODIFIED", pod, before)

    def _record(self, kind: str, pod: Pod, before: Pod | None) -> None:
        pod["metadata"]["resourceVersion"] = self._version(len(self._log) + 1)
        if kind == "DELETED":
            del self.pods[pod["metadata"]["name"]]
        else:
            self.pods[pod["metadata"]["name"]] = pod
        self._log.append((kind, _copy(pod), before and _copy(before)))
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _version(self, position: int) -> str:
        text = f"{position * 2654435761 % 2**32:x}"
        self._positions[text] = position
        return text

    # ---- HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = asyncio.current_task()
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            return  # the client has gone, or was thrown out
        finally:
            del self._connections[writer]
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        verb, target, _ = head.split("\r\n", 1)[0].split(" ")
        url = urlsplit(target)
        asked = {key: values[0] for key, values in parse_qs(url.query).items()}
        assert (verb, url.path) == ("GET", f"/api/v1/namespaces/{self.namespace}/pods")
        self.requests.append(asked)
        for line in head.splitlines():
            if line.lower().startswith("authorization: "):
                self.authorizations.add(line.partition(": ")[2])
        while self.hangs:
            await asyncio.sleep(0.05)
        refusal = self.refusal
        if refusal is None and self._happens(self.trouble.refused):
            refusal = Refusal(
                self._chance.choice((500, 503, 429)), "try later", {"Retry-After": "0"}
            )
        if refusal is not None:
            await self._send(writer, refusal.status, _failure(refusal), refusal.headers)
        elif _is_true(asked, "watch"):
            await self._watch(asked, writer)
        else:
            items = [pod for pod in self.pods.values() if _matches(pod, asked)]
            version = self._version(len(self._log))
            body = {"kind": "PodList", "metadata": {"resourceVersion": version}, "items": items}
            await self._send(writer, 200, body, {})

    async def _send(
        self, writer: asyncio.StreamWriter, status: int, body: Any, headers: dict[str, str]
    ) -> None:
        content = json.dumps(body).encode()
        head = [
            f"HTTP/1.1 {status} Said",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + content)
        await writer.drain()

    async def _watch(self, asked: dict[str, str], writer: asyncio.StreamWriter) -> None:
        position = self._positions.get(asked["resourceVersion"], -1)
        too_old = position < self._oldest or self._happens(self.trouble.gone)
        gone = Refusal(410, "too old resource version")
        if too_old and self._chance.random() < 0.5:
            await self._send(writer, 410, _failure(gone), {})
            return
        head = ("HTTP/1.1 200 OK", "Content-Type: application/json", "Transfer-Encoding: chunked")
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n")
        if too_old:
            await self._chunk(writer, {"type": "ERROR", "object": _failure(gone)})
        else:
            try:
                async with asyncio.timeout(int(asked["timeoutSeconds"])):
                    await self._events(position, asked, writer)
            except TimeoutError:
                pass  # what a watch ends with
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _events(
        self, position: int, asked: dict[str, str], writer: asyncio.StreamWriter
    ) -> None:
        held: dict[str, Any] | None = None
        while True:
            while position < len(self._log):
                kind, pod, before = self._log[position]
                position += 1
                for event in _seen(kind, pod, before, asked):
                    if self._happens(self.trouble.missed):
                        continue
                    if held is None and self._happens(self.trouble.reordered):
                        held = event
                        continue
                    await self._chunk(writer, event)
                    if self._happens(self.trouble.doubled):
                        await self._chunk(writer, event)
                if held is not None and self._chance.random() < 0.5:
                    await self._chunk(writer, held)
                    held = None
            changed = self._changed
            if _is_true(asked, "allowWatchBookmarks") and held is None:
                await self._chunk(writer, self._bookmark(position))
            if position == len(self._log):
                await changed.wait()

    def _bookmark(self, position: int) -> dict[str, Any]:
        metadata = {"resourceVersion": self._version(position), "creationTimestamp": None}
        return {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": metadata, "spec": {}}}

    async def _chunk(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        if self._happens(self.trouble.nonsense):
            event = self._chance.choice(
                [{"type": "ADDED"}, {"type": "ADDED", "object": {"metadata": {}}}, {"object": 1}]
            )
        content = json.dumps(event).encode() + b"\n"
        # Events and chunks have nothing to do with each other.
        border = self._chance.randrange(1, len(content))
        for part in (content[:border], content[border:]):
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
            if self._happens(self.trouble.cut):
                writer.transport.abort()
                raise ConnectionResetError

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._chance.random() < chance


def _is_true(asked: dict[str, str], name: str) -> bool:
    """As Go reads it."""
    return asked.get(name) in ("1", "t", "T", "true", "TRUE", "True")


def _seen(
    kind: str, pod: Pod, before: Pod | None, asked: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """A watcher with a selector sees pods come and go as their labels change."""
    matched = before is not None and _matches(before, asked)
    matches = kind != "DELETED" and _matches(pod, asked)
    if matches:
        yield {"type": "MODIFIED" if matched else "ADDED", "object": pod}
    elif matched:
        yield {"type": "DELETED", "object": pod}


def _matches(pod: Pod, asked: dict[str, str]) -> bool:
    wanted = dict(part.split("=") for part in asked["labelSelector"].split(","))
    labels = pod["metadata"]["labels"]
    return all(labels.get(key) == value for key, value in wanted.items())


def _status(ip: str, *, ready: bool) -> dict[str, Any]:
    status = {
        "phase": "Running" if ip else "Pending",
        "conditions": [
            {"type": "Ready", "status": str(ready)},
            {"type": "PodScheduled", "status": "True"},
        ],
    }
    return status | ({"podIP": ip} if ip else {})


def _failure(refusal: Refusal) -> dict[str, Any]:
    return {
        "kind": "Status",
        "status": "Failure",
        "message": refusal.message,
        "reason": "Expired" if refusal.status == 410 else "Other",
        "code": refusal.status,
    }


def _copy(pod: Pod) -> Pod:
    copied: Pod = json.loads(json.dumps(pod))
    return copied
