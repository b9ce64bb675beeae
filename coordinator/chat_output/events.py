"""What a chat answer's text turns out to be, as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """More of the message's content."""

    text: str


class Reasoning(NamedTuple):
    """More of the model's thought before its answer."""

    text: str


class CallStarted(NamedTuple):
    """The ``call``-th tool call begins; ``id``: where the model gives it one."""

    call: int
    name: str
    id: str | None = None


class CallArguments(NamedTuple):
    """More of the JSON text of that call's arguments."""

    call: int
    text: str


Event = Content | Reasoning | CallStarted | CallArguments


class OutputParser(Protocol):
    """Reads one answer. The events add up to the same however the text is cut into pieces."""

    def feed(self, text: str) -> list[Event]:
        """Return the events that are certain now."""

    def finish(self) -> list[Event]:
        """What was held back, once no text follows."""


def joined(events: Sequence[Event]) -> list[Event]:
    """Neighbours of one kind made one; empty texts left out."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, CallStarted):
            result.append(event)
        elif not event.text:
            continue
        elif isinstance(event, CallArguments):
            if isinstance(last, CallArguments) and last.call == event.call:
                result[-1] = CallArguments(event.call, last.text + event.text)
            else:
                result.append(event)
        elif type(last) is type(event) and isinstance(last, Content | Reasoning):
            result[-1] = type(event)(last.text + event.text)
        else:
            result.append(event)
    return result
