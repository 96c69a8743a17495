"""Workers, what they say to each other, and what may go wrong: all but the requests."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from core.clock import ManualClock
from core.errors import Draining
from tests.protocol.explorer import FAULT
from tests.protocol.fingerprint import FIRST_SECOND, fingerprint
from tests.protocol.kv_fabric import Fabric, Parcel
from tests.protocol.network import Choice, Network
from tests.protocol.process import Process
from tests.protocol.workers import LOOK_SECONDS, DecodeWorker, PrefillWorker, Worker
from transfer import paced

FAULTS = ("leaves", "slow", "lost", "hangs", "cut", "dies", "stops", "hands over")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """A prompt of `num_prompt_tokens` and `max_tokens` more fit into any worker, unless it is made
    smaller here. Of `faults` each happens `most_each` times at most, and `num_faults` in all."""

    num_requests: int = 1
    num_prompt_tokens: int = 3
    max_tokens: int = 3
    decode_pages: int = 4
    prefill_pages: int = 4
    first_prefill_pages: int = 0  # of that worker alone; 0: as the others
    num_workers: int = 1  # of each role
    num_faults: int = 0
    most_each: int = 1
    same_prompts: bool = False
    in_line: bool = False  # one transfer to a peer at a time: others wait, and may be withdrawn
    faults: tuple[str, ...] = FAULTS


@dataclass
class Client:
    """Who reads an answer; `outcome` is how it has ended."""

    name: str
    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    outcome: str = ""
    leave: Callable[[], object] = lambda: None

    def take(self, token_ids: list[int]) -> None:
        self.tokens += token_ids
        begin = self.prompt[-1] + 1
        expected = list(range(begin, begin + len(self.tokens)))
        assert self.tokens == expected, f"{self.name} got {self.tokens}"
        assert len(self.tokens) <= self.max_tokens, f"{self.name} got {self.tokens}"

    def end(self, outcome: str) -> None:
        self.outcome = outcome
        got = f"{self.name} got {self.tokens}: {outcome}"
        assert outcome != "ok" or len(self.tokens) == self.max_tokens, got


class World(ABC):
    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        # Put back with the other stand-ins.
        paced.LEAST_ROOM_BYTES = paced.MOST_ROOM_BYTES = 1 if bounds.in_line else 1 << 20
        self.clock = ManualClock(FIRST_SECOND)
        self.fabric = Fabric()
        self.network = Network()
        self.clients: list[Client] = []
        self.spent: list[str] = []  # faults
        self.gone: list[Worker] = []  # those that others have come for
        self.workers: dict[str, Worker] = {}  # by address
        for number in range(1, bounds.num_workers + 1):
            self._start(PrefillWorker, f"prefill:{number}")
            self._start(DecodeWorker, f"decode:{number}")

    def _start(self, kind: type[Worker], address: str) -> None:
        """A new process, under the name of the one before and another epoch."""
        name = address.replace(":", "-") + "'" * sum(each.address == address for each in self.gone)
        pages = self.bounds.decode_pages
        if kind is PrefillWorker:
            is_first = address == "prefill:1" and self.bounds.first_prefill_pages
            pages = self.bounds.first_prefill_pages if is_first else self.bounds.prefill_pages
        worker = kind(name, address, self.network, self.clock, self.fabric, pages)
        self.workers[address] = self.network.servers[address] = worker

    # ---- of the requests

    @abstractmethod
    def _begin(self) -> None:
        """The next request comes."""

    def _new_client(self) -> Client:
        number = len(self.clients)
        first = 100 if self.bounds.same_prompts else 100 * (number + 1)
        prompt = list(range(first, first + self.bounds.num_prompt_tokens))
        client = Client(f"request {number}", prompt, self.bounds.max_tokens)
        self.clients.append(client)
        return client

    @abstractmethod
    def _can_begin(self) -> bool: ...

    def _others(self) -> list[Process]:
        """Processes that are no workers."""
        return []

    def _own_progress(self) -> Iterator[Choice]:
        yield from ()

    @abstractmethod
    def _check_clients(self) -> None:
        """Everything is over."""

    # ---- what may happen

    def choices(self) -> list[str]:
        return [name for name, _ in self._all()]

    def do(self, choice: str) -> None:
        dict(self._all())[choice]()

    def _all(self) -> list[Choice]:
        soon = [*self._progress()]
        later = [] if soon else [*self._later()]
        return [*soon, *later, *((FAULT + name, act) for name, act in self._faults(bool(soon)))]

    def _progress(self) -> Iterator[Choice]:
        num_begun = len(self.clients)
        if num_begun < self.bounds.num_requests and self._can_begin():
            yield f"request {num_begun} comes", self._begin
        for worker in self._running():
            if worker.has_work:
                yield f"a step of {worker.name}", worker.step_rank
            if worker.link.to_front:
                yield f"{worker.name} hears its rank", worker.hear_rank
        yield from self.network.choices()
        yield from self._own_progress()
        yield from self._landings(of_frozen=False)

    def _landings(self, of_frozen: bool) -> Iterator[Choice]:
        for parcel in self.fabric.parcels:
            if parcel.receiver_is_frozen is of_frozen and parcel not in self.fabric.hanging:
                yield f"{parcel.name} lands", lambda parcel=parcel: self.fabric.land(parcel)

    def _later(self) -> Iterator[Choice]:
        """When nothing is on its way."""
        yield from self._landings(of_frozen=True)
        if self._next_second() is not None:
            yield "time passes", self._pass_time
        for worker in self._living():
            if worker.is_frozen:
                yield f"{worker.name} goes on", worker.go_on

    def _faults(self, is_busy: bool) -> Iterator[Choice]:
        for worker in self.workers.values():
            if not worker.is_alive:
                yield f"another {worker.address} comes", lambda w=worker: self._replace(w)
        for kind in self.bounds.faults:
            times = self.spent.count(kind)
            if len(self.spent) < self.bounds.num_faults and times < self.bounds.most_each:
                for name, act in self._of_kind(kind, is_busy):
                    yield name, lambda act=act, kind=kind: self._spend(kind, act)

    def _of_kind(self, kind: str, is_busy: bool) -> Iterator[Choice]:
        match kind:
            case "leaves":
                for client in self.clients:
                    if not client.outcome:
                        yield f"the client of {client.name} leaves", client.leave
            case "slow" if is_busy and self._next_second() is not None:
                yield "time passes", self._pass_time
            case "lost":
                for parcel in self.fabric.parcels:
                    yield f"{parcel.name} lands unheard", lambda p=parcel: self._land_unheard(p)
            case "hangs":
                for parcel in self.fabric.parcels:
                    yield f"{parcel.name} hangs", lambda p=parcel: self.fabric.hanging.append(p)
            case "cut":
                for connection in self.network.connections:
                    if not connection.is_cut:
                        yield f"{connection.name} breaks", connection.cut
            case "dies" | "stops" | "hands over":
                for worker in self._running():
                    if kind != "hands over":
                        act = worker.crash if kind == "dies" else worker.freeze
                        yield f"{worker.name} {kind}", act
                    elif not worker.front.draining:
                        yield f"{worker.name} {kind}", lambda w=worker: self._drain(w)

    def _spend(self, kind: str, act: Callable[[], None]) -> None:
        self.spent.append(kind)
        act()

    def _land_unheard(self, parcel: Parcel) -> None:
        self.fabric.land(parcel, is_told=False)

    def _replace(self, worker: Worker) -> None:
        self.gone.append(worker)
        self._start(type(worker), worker.address)

    def _drain(self, worker: Worker) -> None:
        worker.front.draining = True
        error = Draining("worker is draining", failed_epoch=worker.epoch)
        worker.loop.call_soon(worker.service.hand_over, error)
        worker.loop.run_ready()

    # ---- time

    def _next_second(self) -> float | None:
        running = self._running()
        times = [each.loop.next_timer for each in (*running, *self._others())]
        if any(worker.awaits_time for worker in running):
            times.append(self.clock.now() + LOOK_SECONDS)
        return min((time for time in times if time is not None), default=None)

    def _pass_time(self) -> None:
        until = self._next_second()
        assert until is not None
        self.clock.advance(max(0.0, until - self.clock.now()))
        for other in self._others():
            other.loop.run_ready()
        for worker in self._running():
            worker.loop.run_ready()
            if worker.awaits_time:
                worker.step_rank()

    # ---- views

    def _living(self) -> list[Worker]:
        return [each for each in self.workers.values() if each.is_alive]

    def _running(self) -> list[Worker]:
        return [each for each in self._living() if not each.is_frozen]

    def check(self) -> None:
        for worker in self._living():
            worker.check()

    def fingerprint(self) -> int:
        workers = [(each.name, each.state()) for each in self.workers.values()]
        others = [(each.name, each.state()) for each in self._others()]
        network = (self.network.connections, self.network.channels)
        roots = (sorted(self.spent), workers, others, network, self.fabric, self.clients)
        return fingerprint(roots, self.clock.now())

    def check_over(self) -> None:
        for worker in self._living():
            worker.check_over()
        assert not self.fabric.parcels, f"{self.fabric.parcels} never land"
        self._check_clients()

    def close(self) -> None:
        for process in (*self._others(), *self.workers.values(), *self.gone):
            process.loop.abandon()
