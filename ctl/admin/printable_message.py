"""Replies whose texts are safe to show: processes choose their own names, and more."""

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from core.printable import printable


def make_printable(message: Message) -> None:
    """Escapes what is not printable, in all texts of `message` and of the messages in it."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else (value,):
                make_printable(each)
        elif field.type == FieldDescriptor.TYPE_STRING:
            if field.is_repeated:
                value[:] = map(printable, value)
            else:
                setattr(message, field.name, printable(value))
