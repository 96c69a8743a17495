"""Replies of the router as plain data, for `--output json` and tables."""

from typing import Any

from google.protobuf.message import Message

_DIGITS = 9


def message_dict(message: Message) -> dict[str, Any]:
    """All fields by name, those of an `identity` among them: numbers as numbers, enum values as
    words (prefill), messages as such dictionaries."""
    told: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.name == "identity":
            told |= message_dict(value)
        elif field.is_repeated:
            told[field.name] = [_plain(field, each) for each in value]
        else:
            told[field.name] = _plain(field, value)
    return told


def _plain(field: Any, value: Any) -> Any:  # noqa: ANN401 - two kinds of descriptors
    if field.message_type is not None:
        return message_dict(value)
    if field.enum_type is not None:
        # ROLE_PREFILL, a value of the enum Role.
        return field.enum_type.values_by_number[value].name.partition("_")[2].lower()
    return round(value, _DIGITS) if isinstance(value, float) else value
