"""Pushes computed pages into the KV targets of their attempts, layer by layer.

    pusher.open(attempt_id, target, pages)
    pusher.push_known(attempt_id, num_pages)             # found in the prefix tree: all layers
    step = pusher.begin_step([(attempt_id, first_page, end_page), ...])
    ... on_layer=step.on_layer ...
    step.finish()                                        # every write is submitted now
    pusher.poll()                                        # what has ended

One transfer serves all attempts of a step that go to the same peer. What happened is returned
as events of `events`; nothing here decides anything.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from core.clock import Clock
from core.errors import TransferError
from engine.link.kv_notice import KvNotice, encode_notices
from prefill_worker.events import PushBegan, PushEnded, PushFailed, PushWithdrawn
from prefill_worker.kv_target import KvGeometry, TargetPages
from transfer.api import AgentDescriptor, Copy, State, Transfer, TransferId
from transfer.paced import LEAST_ROOM_BYTES, PacedTransfer

# Layers are gathered until they make a transfer worth what a transfer costs the host, which is
# launching kernels meanwhile: 40 us on an H200's. NVLink moves these bytes in 5 us, TCP in 1 ms.
LEAST_PUSH_BYTES = 1024 * 1024
# Known prefixes are cut into as few transfers as can take turns with others on a slow network.
MOST_PUSH_BYTES = LEAST_ROOM_BYTES


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages `first` .. `end` of an attempt, counted in token order."""

    attempt_id: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Segment:
    """`count` pages that are consecutive in our pool and in the peer's."""

    source: int
    target: int
    count: int


@dataclass(slots=True)
class _Route:
    """All that a step pushes to one peer."""

    target: TargetPages
    ranges: list[PageRange]
    segments: list[_Segment]
    broken: bool = False


@dataclass(slots=True)
class _Opened:
    """An attempt, and when its first transfer was submitted and its last one ended."""

    target: TargetPages
    pages: list[int]
    began_at: float | None = None
    landed_at: float | None = None
    failed: bool = False
    withdrawn: bool = False


class _Sent(NamedTuple):
    """A transfer that is in flight or in line."""

    attempt_ids: tuple[str, ...]
    num_bytes: int


class Pusher:
    """`kv_cache` [L, pages, page_tokens, kv_dim] is registered with `transfer`."""

    def __init__(
        self, transfer: Transfer, kv_cache: torch.Tensor, geometry: KvGeometry, clock: Clock
    ) -> None:
        self.geometry = geometry
        self.on_cuda = kv_cache.is_cuda
        self.bytes_total = 0  # landed
        self.num_failures = 0  # attempts with a transfer that failed
        # Of attempts that are over: from the first submitting to the last landing. The loop
        # clears it.
        self.landed_seconds: list[float] = []
        self._transfer = PacedTransfer(transfer, clock)
        self._num_pool_pages = kv_cache.shape[1]
        self._clock = clock
        self._opened: dict[str, _Opened] = {}
        self._outstanding: dict[TransferId, _Sent] = {}
        self._ended: list[PushEnded] = []

    @property
    def num_outstanding(self) -> int:
        """Transfers in flight, in line, or ended and not told yet."""
        return len(self._outstanding) + len(self._ended)

    def now(self) -> float:
        return self._clock.now()

    def open(self, attempt_id: str, target: TargetPages, pages: list[int]) -> None:
        """`pages` of our pool go to those of `target`, one by one in token order."""
        assert len(pages) == len(target.pages), (len(pages), len(target.pages))
        self._opened[attempt_id] = _Opened(target, pages)

    def close(self, attempt_id: str) -> None:
        """Nothing of this attempt is in flight or to be pushed any more."""
        opened = self._opened.pop(attempt_id, None)
        if opened is None:
            return
        if opened.failed:
            self.num_failures += 1
        elif opened.landed_at is not None:
            assert opened.began_at is not None
            self.landed_seconds.append(opened.landed_at - opened.began_at)

    def release_peer(self, attempt_id: str) -> None:
        """Gives up the peer of an attempt; `poll` reports its transfers as failed."""
        self._transfer.release(self._opened[attempt_id].target.peer.name)

    def withdraw(self, attempt_id: str) -> list[PushWithdrawn]:
        """Of what waits in line, that which only attempts given up would have, this one too."""
        self._opened[attempt_id].withdrawn = True
        events: list[PushWithdrawn] = []
        flows = (sent.attempt_ids for sent in self._outstanding.values())
        for flow in dict.fromkeys(flow for flow in flows if attempt_id in flow):
            if all(self._opened[each].withdrawn for each in flow):
                for transfer in self._transfer.withdraw(flow):
                    del self._outstanding[transfer]
                    events += [PushWithdrawn(each) for each in flow]
        return events

    def push_known(self, attempt_id: str, num_pages: int) -> list[PushBegan | PushFailed]:
        """The first `num_pages` pages in all layers, in transfers of MOST_PUSH_BYTES."""
        geometry = self.geometry
        most = max(1, MOST_PUSH_BYTES // geometry.page_bytes)  # pages of a layer
        group = max(1, most // num_pages)  # layers
        events: list[PushBegan | PushFailed] = []
        for first in range(0, num_pages, most):
            (route,) = self.routes([PageRange(attempt_id, first, min(first + most, num_pages))])
            for layer in range(0, geometry.num_layers, group):
                events += self.submit(route, layer, min(group, geometry.num_layers - layer))
                if route.broken:
                    return events
        return events

    def begin_step(self, ranges: Sequence[PageRange]) -> "StepPush":
        """For one forward pass, which computes these pages."""
        return StepPush(self, self.routes(ranges))

    def routes(self, ranges: Sequence[PageRange]) -> list[_Route]:
        """Groups ranges by peer, runs of pages joined."""
        routes: dict[AgentDescriptor, _Route] = {}
        for pages in ranges:
            opened = self._opened[pages.attempt_id]
            target, ours = opened.target, opened.pages
            route = routes.setdefault(target.peer, _Route(target, [], []))
            route.ranges.append(pages)
            route.segments.extend(
                _segments(ours[pages.first : pages.end], target.pages[pages.first : pages.end])
            )
        return list(routes.values())

    def submit(
        self, route: _Route, first_layer: int, num_layers: int
    ) -> list[PushBegan | PushFailed]:
        """Starts one transfer; a peer that cannot be reached fails all its attempts."""
        if route.broken:
            return []
        layers = range(first_layer, first_layer + num_layers)
        notices = [
            KvNotice(
                attempt_id=pages.attempt_id,
                first_layer=first_layer,
                num_layers=num_layers,
                first_page=pages.first,
                num_pages=pages.end - pages.first,
            )
            for pages in route.ranges
        ]
        attempt_ids = tuple(pages.attempt_id for pages in route.ranges)
        copies = list(self._copies(route, layers))
        try:
            transfer = self._transfer.submit(
                route.target.peer, copies, encode_notices(notices), flow=attempt_ids
            )
        except TransferError as error:
            route.broken = True
            for pages in route.ranges:
                self._opened[pages.attempt_id].failed = True
            return [PushFailed(pages.attempt_id, error.message) for pages in route.ranges]
        sizes = [notice.num_layer_pages * self.geometry.page_bytes for notice in notices]
        self._outstanding[transfer] = _Sent(attempt_ids, sum(sizes))
        now = self._clock.now()
        for attempt_id in attempt_ids:
            opened = self._opened[attempt_id]
            opened.began_at = now if opened.began_at is None else opened.began_at
        return [PushBegan(*pair) for pair in zip(attempt_ids, sizes, strict=True)]

    def poll(self) -> list[PushEnded]:
        """Transfers that have ended since the last call, one event for each attempt in them."""
        if not self._outstanding:
            self._transfer.poll()  # idle agents, too, have connections to give back
        self.progress()
        events, self._ended = self._ended, []
        return events

    def progress(self) -> None:
        """Lets bytes move, which some transports do only when they are asked."""
        if not self._outstanding:
            return
        for completion in self._transfer.poll():
            attempt_ids, num_bytes = self._outstanding.pop(completion.transfer)
            failed = completion.state is State.FAILED
            self.bytes_total += 0 if failed else num_bytes
            error = (completion.error or "the peer is gone") if failed else ""
            now = self._clock.now()
            for attempt_id in attempt_ids:
                opened = self._opened[attempt_id]
                opened.failed = opened.failed or failed
                opened.landed_at = now
                self._ended.append(PushEnded(attempt_id, error))

    def _copies(self, route: _Route, layers: range) -> Iterator[Copy]:
        page_bytes = self.geometry.page_bytes
        for layer in layers:
            source = layer * self._num_pool_pages
            target = layer * route.target.num_pool_pages
            for segment in route.segments:
                yield Copy(
                    (source + segment.source) * page_bytes,
                    (target + segment.target) * page_bytes,
                    segment.count * page_bytes,
                )


class StepPush:
    """The pushes of one forward pass. Its events carry the time at which they happened.

    On a GPU a layer is computed when its event has passed, not when its kernels are queued:
    layers wait in line until then, and `finish` waits for the last.
    """

    def __init__(self, pusher: Pusher, routes: list[_Route]) -> None:
        self._pusher = pusher
        self._routes = routes
        self._num_layers = pusher.geometry.num_layers
        num_pages = sum(segment.count for route in routes for segment in route.segments)
        layer_bytes = num_pages * pusher.geometry.page_bytes
        self._group = -(-LEAST_PUSH_BYTES // layer_bytes) if layer_bytes else self._num_layers
        self._num_reported = 0
        self._num_queued = 0
        self._line: list[tuple[torch.cuda.Event | None, int, int]] = []
        self.events: list[tuple[PushBegan | PushFailed, float]] = []

    def on_layer(self, layer: int) -> None:
        """The latents of `layer` are (on a GPU: will be) in the pages."""
        assert layer == self._num_reported, (layer, self._num_reported)
        self._num_reported += 1
        if not self._routes:
            return
        num_new = self._num_reported - self._num_queued
        if num_new >= self._group or self._num_reported == self._num_layers:
            event = None
            if self._pusher.on_cuda:
                event = torch.cuda.Event()
                event.record()
            self._line.append((event, self._num_queued, num_new))
            self._num_queued = self._num_reported
        self._submit_computed()
        self._pusher.progress()

    def finish(self) -> list[tuple[PushBegan | PushFailed, float]]:
        """Submits what is left; all events of the step. May be called again."""
        while self._line:
            event = self._line[0][0]
            if event is not None:
                event.synchronize()
            self._submit_computed()
            self._pusher.progress()
        return self.events

    def _submit_computed(self) -> None:
        while self._line:
            event, first_layer, num_layers = self._line[0]
            if event is not None and not event.query():
                return
            del self._line[0]
            for route in self._routes:
                now = self._pusher.now()
                for happened in self._pusher.submit(route, first_layer, num_layers):
                    self.events.append((happened, now))


def _segments(ours: Sequence[int], theirs: Sequence[int]) -> list[_Segment]:
    segments: list[_Segment] = []
    begin = 0
    for index in range(1, len(ours) + 1):
        joined = (
            index < len(ours)
            and ours[index] == ours[index - 1] + 1
            and theirs[index] == theirs[index - 1] + 1
        )
        if not joined:
            segments.append(_Segment(ours[begin], theirs[begin], index - begin))
            begin = index
    return segments
