"""Request bodies: strict JSON, then a pydantic model; every fault is the client's and named."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from core.errors import Cancelled, InvalidRequest
from gateway.requests.unsupported import refuse_unsupported

MAX_PROBLEMS_SHOWN = 3
# What is done with larger bodies takes milliseconds, and others would wait for it.
LARGE_BYTES = 16 * 2**10


class RequestModel(BaseModel):
    """Base of what clients send: no conversions ("5" is not a number), unknown fields kept
    aside so that `refuse_unsupported` can look at them."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


# Of whole bodies: `refuse_unsupported` does not take other fields, so the document must say so.
WHOLE_BODY = ConfigDict(json_schema_extra={"additionalProperties": False})


class ClosedModel(RequestModel):
    """Refuses what it does not know."""

    model_config = ConfigDict(extra="forbid")


Item = TypeVar("Item")
# A list of which the first wrong item is complained about: each of a million complaints would
# cost a kilobyte, and the event loop microseconds.
Items = Annotated[list[Item], Field(fail_fast=True)]

# What messages are made of, in all of them together: their models are made under the
# interpreter's lock, those of a body full of empty parts in most of a second.
MAX_PARTS = 8192


def _check_parts(messages: Any) -> Any:  # noqa: ANN401 - not validated yet
    lists, num_parts = [messages], 0
    while lists and num_parts <= MAX_PARTS:
        below = [*_lists_in(lists.pop())]
        num_parts += sum(map(len, below))
        lists += below
    if num_parts > MAX_PARTS:
        raise ValueError(f"more than {MAX_PARTS} parts and calls in all")
    return messages


def _lists_in(items: Any) -> Iterator[list[Any]]:  # noqa: ANN401 - as above
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict):
            yield from (value for value in item.values() if isinstance(value, list))


# Before a list of messages: refuses one whose messages have too much in them.
BoundedParts = BeforeValidator(_check_parts)

Body = TypeVar("Body", bound=RequestModel)
Result = TypeVar("Result")


async def read_body(request: Request, model: type[Body]) -> Body:
    """The request's body as `model`.

    Raises InvalidRequest that names the field to blame, and Cancelled when the client leaves
    before all of it is there.
    """
    try:
        content = await request.body()
    except ClientDisconnect as error:
        raise Cancelled("the client went away") from error
    return await aside(len(content), _parse, content, model)


async def aside(size: int, call: Callable[..., Result], *arguments: Any) -> Result:  # noqa: ANN401
    """What `call` returns, which takes as long as `size`, in bytes of a body, says: in a thread
    where that is long."""
    if size <= LARGE_BYTES:
        return call(*arguments)
    return await asyncio.to_thread(call, *arguments)


def _parse(content: bytes, model: type[Body]) -> Body:
    body = parse_json(content)
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return parse_fields(body, model)


def parse_fields(body: dict[str, Any], model: type[Body]) -> Body:
    """Raises InvalidRequest that names the field to blame."""
    try:
        parsed = model.model_validate(body)
    except ValidationError as error:
        raise _named(error, body) from error
    refuse_unsupported(parsed.model_extra or {})
    return parsed


def parse_json(content: bytes) -> Any:  # noqa: ANN401 - JSON is anything
    """Strict JSON: no NaN, no infinities, valid UTF-8, bounded depth."""
    try:
        return msgspec.json.decode(content)
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def _named(error: ValidationError, body: dict[str, Any]) -> InvalidRequest:
    """One error for pydantic's many: the first field at fault and what it should have been.

    Of the branches of a union those count that led deepest into the value.
    """
    problems = error.errors(include_url=False, include_input=False)
    paths = [
        _path(problem["loc"], body, is_missing=problem["type"] == "missing") for problem in problems
    ]
    of_first_field = [path for path in paths if path[:1] == paths[0][:1]]
    deepest = max(of_first_field, key=len)
    messages: dict[str, None] = {}  # in order, each once
    for problem, path in zip(problems, paths, strict=True):
        if path == deepest:
            messages[problem["msg"].removeprefix("Value error, ")] = None
    shown = "; or: ".join([*messages][:MAX_PROBLEMS_SHOWN])
    param = "".join(deepest)
    return InvalidRequest(f"{param}: {shown}" if param else shown, param=param or None)


def _path(
    location: Sequence[str | int], body: dict[str, Any], *, is_missing: bool
) -> tuple[str, ...]:
    """The parts of `messages[0].content`. Pydantic's location also names the branches of
    unions that it tried: what does not lead anywhere in the body is left out."""
    path: list[str] = []
    here: Any = body
    for depth, part in enumerate(location):
        if isinstance(here, dict) and isinstance(part, str):
            is_last = depth == len(location) - 1
            if part in here or (is_missing and is_last):
                path.append(f".{part}" if path else part)
                here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            path.append(f"[{part}]")
            here = here[part]
    return tuple(path)
