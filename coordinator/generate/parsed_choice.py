"""A choice of a chat whose text is read for thoughts and tool calls."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from ..chat_output.events import CallArguments, CallStarted, Event, Reasoning, joined
from ..chat_output.markers import MarkFinder
from ..chat_output.reasoning import SPACE, ThoughtMarks
from ..text.detokenizer import Detokenizer, MarkedDetokenizer
from .chat_reading import ChatReading
from .choice import Choice, Exchange
from .formats import ChoiceResult, ReportedReason
from .prompts import Prompt

SPELLED_OUT = "<\ud800"
"""What the parsers read for a ``<`` that begins no token of a mark: no text has a lone surrogate."""


class ThoughtCounter:
    """A detokenizer around another one. ``num_tokens``: of the thoughts so far, their marks included."""

    def __init__(self, inner: Detokenizer, reading: ChatReading, marks: ThoughtMarks, opened: bool) -> None:
        """``opened``: the prompt ends with the opening mark already; see ``ReasoningParser``."""
        self.num_tokens = 0
        self._inner, self._reading, self._repeated = inner, reading, marks.repeated
        self._opens, self._closes = MarkFinder([marks.opens]), MarkFinder([marks.closes])
        self._within, self._over = opened, False
        self._num_held = 0  # tokens that may yet become the opening mark

    def step(self, token_id: int) -> str:
        """The inner one's text."""
        text = self._inner.step(token_id)
        if not self._over:
            is_spelled_out = self._reading.tokens_only and token_id not in self._reading.marks
            self._count(text.replace("<", SPELLED_OUT) if is_spelled_out else text)
        return text

    def finish(self) -> str:
        """The inner one's."""
        return self._inner.finish()

    def _count(self, text: str) -> None:
        self._num_held += 1
        if not self._within:
            before, mark, text = self._opens.feed(text)
            self._over = bool(before.strip(SPACE)) and not self._repeated
            if self._over or mark is None:
                self._num_held = 0 if before.strip(SPACE) else self._num_held
                return
            self._within = True
        self.num_tokens, self._num_held = self.num_tokens + self._num_held, 0
        if self._closes.feed(text)[1] is not None:
            self._within, self._over = False, not self._repeated


class ParsedChoice(Choice):
    """Reports calls as events with ids of its own; calls beyond the plan's bound are left out."""

    __slots__ = ("_ids", "_parser", "_reading", "_starts", "_thought")

    def __init__(self, exchange: Exchange, index: int, prompt: Prompt, request_id: str) -> None:
        super().__init__(exchange, index, prompt, request_id)
        reading = exchange.plan.reading
        assert reading is not None, "a plain answer is not parsed"
        self._reading, self._parser = reading, reading.parser(prompt.text)
        self._ids: list[str] = []
        self._thought: ThoughtCounter | None = None
        marked = MarkedDetokenizer(self._detokenizer, reading.marks, before="".join(self._parts))
        self._detokenizer, self._starts = marked, marked.starts
        if (marks := reading.style.thought_marks) is not None:
            opened = reading.style.thinks_already(prompt.text)
            self._thought = self._detokenizer = ThoughtCounter(marked, reading, marks, opened)
        self._step = self._detokenizer.step

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._thought is None else self._thought.num_tokens

    def flush(self) -> None:
        """See ``Sink``."""
        if self._parts and self._plan.streamed:
            self._flush_checked()

    def last_chunk(self, reason: ReportedReason) -> bytes:
        chunks = self._event_chunks(self._read(self._rest(), last=True))
        return self._opening() + chunks + self._chunk({}, self._reason(reason))

    def result(self, reason: ReportedReason) -> ChoiceResult:
        text = self._rest()
        events = joined(self._read(text, last=True))
        content = "".join(
            event.text for event in events if not isinstance(event, CallStarted | CallArguments | Reasoning)
        )
        thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
        names = [event.name for event in events if isinstance(event, CallStarted)]
        arguments = [
            "".join(e.text for e in events if isinstance(e, CallArguments) and e.call == call)
            for call in range(len(names))
        ]
        called = [{"name": name, "arguments": text} for name, text in zip(names, arguments, strict=True)]
        result = ChoiceResult(
            self.index,
            content,
            self._show("", last=True),
            self._reason(reason),
            reasoning=thoughts or None,
            more=self._more(),
            of_prompt=None if self._of_prompt is None else self._of_prompt.result(),
        )
        if not self._reading.as_function_call:
            result.tool_calls = [
                {"id": id, "type": "function", "function": one}
                for id, one in zip(self._ids, called, strict=True)
            ]
        elif called:
            result.function_call = called[0]
        return result

    def _chunks(self, text: str) -> bytes:
        return self._event_chunks(self._read(text, last=False))

    def _read(self, text: str, *, last: bool) -> list[Event]:
        events = self._parser.feed(self._readable(text))
        self._num_shown += len(text)
        if last:
            events += self._parser.finish()
        events = [
            _as_written(e)
            for e in events
            if not isinstance(e, CallStarted | CallArguments) or e.call < self._reading.max_calls
        ]
        for event in events:
            if isinstance(event, CallStarted):
                short = self._reading.short_call_ids
                made = secrets.token_hex(5)[:9] if short else f"call_{secrets.token_hex(12)}"
                self._ids.append(event.id or made)
        return events

    def _readable(self, text: str) -> str:
        """Return the text in which the parsers find marks."""
        if "<" not in text or not self._reading.tokens_only:
            return text
        at, starts = self._num_shown, self._starts
        return re.sub("<", lambda found: "<" if at + found.start() in starts else SPELLED_OUT, text)

    def _event_chunks(self, events: Sequence[Event]) -> bytes:
        return b"".join([self._chunk(self._fields(event), None) for event in events])

    def _fields(self, event: Event) -> dict[str, Any]:
        if isinstance(event, CallStarted):
            function = {"name": event.name, "arguments": ""}
            if self._reading.as_function_call:
                return {"function_call": function}
            return {
                "tool_calls": [
                    {
                        "index": event.call,
                        "id": self._ids[event.call],
                        "type": "function",
                        "function": function,
                    }
                ]
            }
        if isinstance(event, CallArguments):
            if self._reading.as_function_call:
                return {"function_call": {"arguments": event.text}}
            return {"tool_calls": [{"index": event.call, "function": {"arguments": event.text}}]}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text, "reasoning": event.text}
        return {"content": event.text}

    def _reason(self, reason: ReportedReason) -> ReportedReason:
        if not self._ids or reason != "stop":
            return reason
        return "function_call" if self._reading.as_function_call else "tool_calls"


def _as_written(event: Event) -> Event:
    """Return the event with the model's own text."""
    if isinstance(event, CallStarted) or SPELLED_OUT[1] not in event.text:
        return event
    return event._replace(text=event.text.replace(SPELLED_OUT[1], ""))
