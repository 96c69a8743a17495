"""A canonical snapshot of whatever hangs from some objects, coroutines in mid-air included.

Two worlds with equal fingerprints behave alike from here on. Times count from now, and beyond
MOST_SECONDS all the same; what is only told (records, metrics, totals) does not count.
"""

import asyncio
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec
import torch
from google.protobuf.message import Message

# Clocks begin here: a larger number is a time, a smaller one a duration.
FIRST_SECOND = 1e6
MOST_SECONDS = 12.0
TOLD = {
    "records", "record", "spans", "metrics", "totals", "kv_waits", "stats", "accepted_at",
    "reserved_at", "last_sent_at", "chosen_at", "began", "landed_at", "began_at", "arrived_at",
    "started_at", "first_push_at", "compute_seconds", "queue_seconds", "transfer_seconds",
    "_metrics", "_steps", "_num_steps", "_num_computed_tokens", "_num_cached_tokens", "_clock",
    "clock", "_loop", "loop", "network", "_reported_at", "_reported_free", "bytes_total",
    "landed_seconds", "num_failures", "_chosen_at", "_context", "settings", "front", "_settings",
    "_front", "_agent", "facts", "geometry", "_geometry", "_group", "_runner", "_experts",
    "_grammars", "_check", "sampling", "target", "behaviour", "_model", "_on_gone", "_on_draining",
    "_send", "_released", "_on_lost", "_eos_token_ids", "stub", "_num_parcels", "_serializers",
    "_options",
}  # fmt: skip
_ATOMS = {int, str, bytes, bool, type(None)}


def fingerprint(roots: object, now: float) -> int:
    return hash(tuple(_Walk(now).of(roots)))


class _Walk:
    def __init__(self, now: float) -> None:
        self._now = now
        self._seen: dict[int, int] = {}
        self._out: list[Any] = []

    def of(self, root: object) -> list[Any]:
        self._visit(root)
        return self._out

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _ATOMS:
            self._out.append(value)
        elif kind is float:
            is_time = value >= FIRST_SECOND / 2
            self._out.append(round(min(self._now - value, MOST_SECONDS), 3) if is_time else value)
        elif kind is tuple:
            self._list(value)
        elif id(value) in self._seen:
            self._out.append(("again", self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._seen)
            _VISITS.get(kind, _Walk._object)(self, value)

    def _each(self, name: str, values: Any) -> None:
        self._out.append((name, len(values)))
        for each in values:
            if type(each) in _ATOMS:
                self._out.append(each)
            else:
                self._visit(each)

    def _list(self, value: Any) -> None:
        self._each("list", value)

    def _set(self, value: Any) -> None:
        self._each("set", sorted(value, key=str))

    def _dict(self, value: Any) -> None:
        out = self._out
        out.append(len(value))
        for key, each in value.items():
            if key in TOLD:
                continue
            if type(key) in _ATOMS:
                out.append(key)
            else:
                self._visit(key)
            if type(each) in _ATOMS:
                out.append(each)
            else:
                self._visit(each)

    def _code(self, value: Any) -> None:
        is_coro = isinstance(value, types.CoroutineType)
        frame = value.cr_frame if is_coro else value.ag_frame
        self._out.append((value.__qualname__, frame.f_lasti if frame else None))
        if frame is not None:
            self._dict(frame.f_locals)
        self._visit(value.cr_await if is_coro else value.ag_await)

    def _future(self, value: "asyncio.Future[Any]") -> None:
        if not value.done():
            self._out.append("open")
        elif value.cancelled():
            self._out.append("cancelled")
        else:
            self._visit(value.exception() or value.result())

    def _task(self, value: "asyncio.Task[Any]") -> None:
        self._out.append(("task", value.cancelling()))
        self._visit(value.get_coro())

    def _timer(self, value: asyncio.TimerHandle) -> None:
        self._visit(value.when())
        self._visit(value._callback)
        self._visit(value._args)

    def _method(self, value: types.MethodType) -> None:
        self._out.append(value.__func__.__qualname__)
        self._visit(value.__self__)

    def _function(self, value: Any) -> None:
        self._out.append(getattr(value, "__qualname__", "?"))

    def _bytes(self, value: Any) -> None:
        self._out.append(bytes(value))

    def _tensor(self, value: torch.Tensor) -> None:
        self._out.append(value.numpy().tobytes())

    def _skip(self, value: object) -> None: ...

    def _object(self, value: Any) -> None:
        if isinstance(value, Enum):
            self._out.append(value.name)
        elif isinstance(value, Message):
            self._out.append(value.SerializeToString(deterministic=True))
        elif isinstance(value, tuple):
            self._each("tuple", value)
        elif isinstance(value, BaseException):
            self._out.append(repr(value))
        else:
            self._out.append(type(value).__name__)
            names = _names(type(value))
            self._out.append(len(names))
            for name in names:
                self._visit(getattr(value, name, None))
            if hasattr(value, "__dict__"):
                self._dict(value.__dict__)


_NAMES: dict[type, tuple[str, ...]] = {}


def _names(kind: type) -> tuple[str, ...]:
    """Slots."""
    if kind not in _NAMES:
        if issubclass(kind, msgspec.Struct):
            slots = list(kind.__struct_fields__)
        else:
            slots = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]
        _NAMES[kind] = tuple(
            name for name in slots if name not in TOLD and not name.startswith("__")
        )
    return _NAMES[kind]


class _Probe:
    def method(self) -> None: ...


_VISITS: dict[type, Callable[[_Walk, Any], None]] = {
    list: _Walk._list,
    bytearray: _Walk._bytes,
    memoryview: _Walk._bytes,
    deque: _Walk._list,
    set: _Walk._set,
    frozenset: _Walk._set,
    dict: _Walk._dict,
    OrderedDict: _Walk._dict,
    types.CoroutineType: _Walk._code,
    types.AsyncGeneratorType: _Walk._code,
    asyncio.Future: _Walk._future,
    asyncio.Task: _Walk._task,
    asyncio.TimerHandle: _Walk._timer,
    types.MethodType: _Walk._method,
    types.FunctionType: _Walk._function,
    types.BuiltinFunctionType: _Walk._function,
    types.FrameType: _Walk._skip,
    torch.Tensor: _Walk._tensor,
    weakref.WeakValueDictionary: _Walk._skip,
}
