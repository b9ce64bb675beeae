"""A worker's part of a request, as spans of the request's trace. They are derived from the messages that
pass, so that no core knows of them. Pure.

prefill worker    Prefill ........ FirstToken                    "prefill queue", then "prefill"
decode worker     Handoff ........ Joined                        "handoff"
                                   Joined ........ last token    "decode"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ..messages.messages import (
    Cancel,
    FirstToken,
    Handoff,
    Joined,
    Message,
    Prefill,
    RequestFailed,
    RequestSpec,
    StepTokens,
    from_u32,
)

MAX_OPEN = 1 << 16
Key = tuple[int, int]
"""(coordinator's incarnation, dispatch)"""
Attribute = str | int | float | bool


class WorkerSpan(NamedTuple):
    """Times in monotonic seconds. ``traceparent``: of the request's own span,
    https://www.w3.org/TR/trace-context/"""

    name: str
    traceparent: str
    begin: float
    end: float
    attributes: Mapping[str, Attribute]
    error: str = ""


class _Open(NamedTuple):
    name: str
    spec: RequestSpec
    begin: float


class WorkerTrace:
    """``emit`` takes each span as it ends. Requests without a ``traceparent`` leave no trace."""

    def __init__(self, emit: Callable[[WorkerSpan], None]) -> None:
        self._emit = emit
        self._open: dict[Key, _Open] = {}

    def received(self, message: Message, now: float) -> None:
        """Note a message from the coordinator, or from a prefill worker."""
        if isinstance(message, Prefill):
            self._begin("prefill", message.spec, now)
        elif isinstance(message, Handoff):
            self._begin("handoff", message.spec, now)
        elif isinstance(message, Cancel):
            for dispatch in from_u32(message.dispatches):
                self._end((message.coordinator, dispatch), now, cancelled=True)

    def sent(self, messages: Iterable[Message], now: float) -> None:
        """Note messages to the coordinator."""
        for message in messages:
            self._sent(message, now)

    def _sent(self, message: Message, now: float) -> None:
        """Most steps end nothing, and cost nothing here."""
        if isinstance(message, StepTokens):
            if message.finished:
                dispatches, indices = from_u32(message.dispatches), from_u32(message.indices)
                for row, reason in message.finished.items():
                    self._end(
                        (message.coordinator, dispatches[row]),
                        now,
                        output_tokens=indices[row] + 1,
                        finish_reason=reason,
                    )
        elif isinstance(message, FirstToken):
            self._first_token(message, now)
        elif isinstance(message, Joined):
            key = (message.coordinator, message.dispatch)
            if (opened := self._end(key, now, cached_blocks=message.num_cached_blocks)) is not None:
                self._begin("decode", opened.spec, now)
        elif isinstance(message, RequestFailed):
            self._end(
                (message.coordinator, message.dispatch), now, error=f"{message.kind}: {message.message}"
            )

    def _first_token(self, message: FirstToken, now: float) -> None:
        key = (message.coordinator, message.dispatch)
        if (opened := self._open.get(key)) is not None:
            began = min(now, opened.begin + message.queue_s)
            self._emit(
                WorkerSpan(
                    "prefill queue",
                    opened.spec.traceparent,
                    opened.begin,
                    began,
                    {"dispatch": message.dispatch},
                )
            )
            self._open[key] = opened._replace(begin=began)
            self._end(key, now, prompt_tokens=opened.spec.num_tokens, cached_tokens=message.num_cached_tokens)

    def _begin(self, name: str, spec: RequestSpec, now: float) -> None:
        if not spec.traceparent:
            return
        if len(self._open) >= MAX_OPEN:  # their ends were lost on the way
            del self._open[next(iter(self._open))]
        self._open[spec.coordinator, spec.dispatch] = _Open(name, spec, now)

    def _end(self, key: Key, now: float, error: str = "", **attributes: Attribute) -> _Open | None:
        opened = self._open.pop(key, None)
        if opened is not None:
            spec = opened.spec
            known: dict[str, Attribute] = {
                "request_id": spec.request_id,
                "epoch": spec.epoch,
                "dispatch": spec.dispatch,
            }
            self._emit(
                WorkerSpan(opened.name, spec.traceparent, opened.begin, now, {**known, **attributes}, error)
            )
        return opened
