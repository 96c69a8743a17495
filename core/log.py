"""Structured logging: one line an event, on stderr, with the ids of request and trace.

    log = get_logger("router.watch")
    log.info("worker joined", worker=name, epoch=epoch)

Lines logged within `request_context` (rpc servers enter it) carry the request's id, also those of
libraries.
"""

import faulthandler
import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, ExcInfo, FilteringBoundLogger, Processor, WrappedLogger

from core.printable import printable
from core.trace_context import TRACE

# gRPC's core remarks on each lost connection, past our format. It reads this when it is
# imported: a process's __main__ imports this module first.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")

LogFormat = Literal["json", "console"]
LEVELS = ("debug", "info", "warning", "error")
# Does nothing to who does not listen. Not SIGUSR1: LLVM, within Triton, takes that for itself.
STACKS_SIGNAL = signal.SIGURG


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Marks everything logged inside the block with `request_id`.
    NOTE: async generators, whose pieces may run in different contexts, set `REQUEST_ID` instead.
    """
    token = REQUEST_ID.set(request_id)
    try:
        yield
    finally:
        REQUEST_ID.reset(token)


def configure(role: str, name: str, level: str = "info", fmt: LogFormat = "console") -> None:
    """Sends structlog and the standard library's logging to stderr, in one format, `role` and
    `name` on every line; on STACKS_SIGNAL where each thread is. ValueError for an unknown level."""
    number = _level_number(level)

    def add_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["role"], event["process"] = role, name
        request_id = REQUEST_ID.get()
        if request_id:
            event.setdefault("request_id", request_id)
        trace = TRACE.get()
        if trace is not None:
            event.setdefault("trace_id", trace.trace_id)
        return event

    shared: list[Processor] = [
        add_process,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        # Asks the standard library for the level each time, so that `set_level` is obeyed by
        # loggers that are in use already.
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(fmt),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    # Written without the interpreter's help: a process that hangs in a library tells, too.
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)


def set_level(level: str) -> str:
    """Logs from `level` on, from now on; returns the level until now. Raises ValueError."""
    number = _level_number(level)
    root = logging.getLogger()
    previous = logging.getLevelName(root.level).lower()
    root.setLevel(number)
    return previous


def current_level() -> str:
    """The least level that is logged."""
    return logging.getLevelName(logging.getLogger().level).lower()


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger that takes an event text and keyword fields; `name` is dotted, as modules are."""
    return cast("FilteringBoundLogger", structlog.get_logger(name))


def _level_number(level: str) -> int:
    if level.lower() not in LEVELS:
        raise ValueError(f"unknown log level {level!r}: use one of {', '.join(LEVELS)}")
    return logging.getLevelNamesMapping()[level.upper()]


def _renderers(fmt: LogFormat) -> list[Processor]:
    if fmt == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # NOTE: the default traceback shows local variables, and with them users' prompts.
    return [
        _escape_controls,
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_traceback),
    ]


def _escape_controls(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Texts of clients, such as paths, are not for the terminal to obey."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = printable(value)
    return event


def _traceback(output: TextIO, exc_info: ExcInfo) -> None:
    """Line by line, as the exception's own text may be a client's."""
    plain = io.StringIO()
    structlog.dev.plain_traceback(plain, exc_info)
    output.write("\n".join(map(printable, plain.getvalue().split("\n"))))
