"""Options of commands as the fields of a dataclass."""

import inspect
from collections.abc import Callable
from typing import Any

Command = Callable[..., None]


def with_options(options: type[Any]) -> Callable[[Command], Command]:
    """Makes a typer command of a function whose first parameter is an `options`: in its place
    the command has the options that the fields are annotated with."""
    return lambda command: _flattened(options, command)


def _flattened(options: type[Any], command: Command) -> Command:
    _first, *own = inspect.signature(command, eval_str=True).parameters.values()
    shared = inspect.signature(options).parameters

    def run(**values: Any) -> None:  # noqa: ANN401 - whatever the command's options are
        command(options(**{name: values.pop(name) for name in shared}), **values)

    parameters = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*shared.values(), *own)
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run
