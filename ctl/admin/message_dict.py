"""Replies of the router as plain data, for `--output json` and tables."""

from typing import Any

from google.protobuf.message import Message

_DIGITS = 9


def message_dict(message: Message) -> dict[str, Any]:
    """All fields by name: numbers as numbers, enum values as words (prefill), messages as such
    dictionaries."""
    return {
        field.name: (
            [_plain(field, each) for each in getattr(message, field.name)]
            if field.is_repeated
            else _plain(field, getattr(message, field.name))
        )
        for field in message.DESCRIPTOR.fields
    }


def _plain(field: Any, value: Any) -> Any:  # noqa: ANN401 - two kinds of descriptors
    if field.message_type is not None:
        return message_dict(value)
    if field.enum_type is not None:
        # ROLE_PREFILL, a value of the enum Role.
        return field.enum_type.values_by_number[value].name.partition("_")[2].lower()
    return round(value, _DIGITS) if isinstance(value, float) else value
