"""When each token of a sequence came to the coordinator, for the trace file (--trace-token-times)."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from ...transport.messages.messages import TokenLogprobs
from ..lifecycle.request import Ended, Sink


class TimedSink:
    """A ``Sink`` that notes the time of each token and hands all on. ``times``: monotonic seconds."""

    __slots__ = ("_sink", "flush", "times")

    def __init__(self, sink: Sink) -> None:
        self._sink, self.flush = sink, sink.flush
        self.times: list[float] = []

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.times.append(monotonic())
        self._sink.push(token_id, logprobs)

    def push_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self._sink.push_prompt_logprobs(logprobs)

    def end(self, ended: Ended) -> None:
        self._sink.end(ended)
