"""What is checked of a decoded message beyond the types of its fields: columns end with a whole item, and
fields fit together."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import get_type_hints

from .fields import ITEM_BYTES, Message


class Checks:
    """Those of one type of message, and of the messages that are its fields."""

    def __init__(self, kind: type[Message]) -> None:
        self._columns = tuple((place, attrgetter(place), item_bytes) for place, item_bytes in _columns(kind))
        self._parts = tuple(attrgetter(place) if place else _whole_message for place in _parts(kind))

    def check(self, message: Message) -> None:
        """Raises ValueError with a sentence that names the place."""
        for place, read, item_bytes in self._columns:
            if (size := len(read(message))) % item_bytes:
                raise ValueError(f"{place}: {size} bytes are no whole number of {item_bytes}-byte items")
        for part in self._parts:
            part(message).check()


def _columns(kind: type[Message]) -> Iterator[tuple[str, int]]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if meta.extra:
                yield name, meta.extra[ITEM_BYTES]
    for name, within in _fields_that_are_messages(kind):
        for place, item_bytes in _columns(within):
            yield f"{name}.{place}", item_bytes


def _parts(kind: type[Message]) -> Iterator[str]:
    """The places of what has fields that must fit together; "" is the message itself."""
    if kind.check is not Message.check:
        yield ""
    for name, within in _fields_that_are_messages(kind):
        for place in _parts(within):
            yield f"{name}.{place}".removesuffix(".")


def _whole_message(message: Message) -> Message:
    return message


def _fields_that_are_messages(kind: type[Message]) -> Iterator[tuple[str, type[Message]]]:
    for name, hint in get_type_hints(kind).items():
        if isinstance(hint, type) and issubclass(hint, Message):
            yield name, hint
