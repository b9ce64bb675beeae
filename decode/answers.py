"""The answers of clients that have an idempotency key: such a client may come to another coordinator, and has
its answer resumed from here. Pure; times in seconds.

    runs --its end--> kept, for KEPT_S
      |    \\--Resume--> runs, as a dispatch of the coordinator that asks
      |--its coordinator is gone--> runs on, for KEPT_S at most, unless that comes back
       \\--cancelled--> forgotten
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import NamedTuple

from ..transport.handoff.protocol import Key
from ..transport.messages.messages import FinishReason, Resume, StepTokens, u32
from .rows import DecodeResult
from .scheduler import DecodeScheduler
from .sequences import DecodeSequence

KEPT_S = 30.0
MAX_KEPT, MAX_KEPT_TOKENS = 1024, 1 << 20
"""Bounds of complete answers: the oldest are forgotten first."""
MAX_TOKENS_A_MESSAGE = 4096


class CompleteAnswer(NamedTuple):
    tokens: list[int]
    reason: FinishReason
    until: float


class Answers:
    """Knows the answers that may be resumed, and reports them as they come and go."""

    def __init__(self, scheduler: DecodeScheduler, kept_s: float) -> None:
        self._scheduler, self._kept_s = scheduler, kept_s
        self._complete: OrderedDict[bytes, CompleteAnswer] = OrderedDict()
        self._num_tokens = 0  # of complete answers
        self._reported: set[bytes] = set()
        self._alone: dict[Key, float] = {}  # without a coordinator, until then; inf: since the last tick

    def outlives_coordinator(self, key: Key) -> bool:
        """Whether the sequence goes on without its coordinator; for ``kept_s`` from the next tick on."""
        sequence = self._scheduler.get(key)
        if sequence is None or not sequence.answer_id:
            return False
        self._alone.setdefault(key, inf)
        return True

    def has_coordinator(self, key: Key) -> None:
        """Note that the sequence's coordinator is there, perhaps again."""
        self._alone.pop(key, None)

    def running(self, answer_id: bytes) -> DecodeSequence | None:
        """Return the sequence that generates this answer."""
        return next((s for s in self._scheduler.running.values() if s.answer_id == answer_id), None)

    def complete(self, answer_id: bytes) -> CompleteAnswer | None:
        """Return an answer that is kept."""
        return self._complete.get(answer_id)

    def keep(self, result: DecodeResult, now: float) -> None:
        """Keep the answers that a step has completed."""
        for row, reason in result.finished.items():
            sequence = result.step.sequences[row]
            if sequence.answer_id:
                self._forget(sequence.answer_id)
                tokens = sequence.state.output_token_ids
                self._complete[sequence.answer_id] = CompleteAnswer(tokens, reason, now + self._kept_s)
                self._num_tokens += len(tokens)
        while len(self._complete) > MAX_KEPT or self._num_tokens > MAX_KEPT_TOKENS:
            self._forget(next(iter(self._complete)))

    def tick(self, now: float) -> list[Key]:
        """Forget complete answers that are old. Return the sequences that lack a coordinator for too long."""
        here, until = self._scheduler.get, now + self._kept_s
        self._alone = {key: min(end, until) for key, end in self._alone.items() if here(key)}
        over = [key for key, end in self._alone.items() if now >= end]
        while self._complete and now >= next(iter(self._complete.values())).until:
            self._forget(next(iter(self._complete)))
        return over

    def changes(self, everything: bool) -> tuple[bytes, bytes]:
        """Return the answers that can be resumed since the last call, and those that no longer can, as
        columns; with ``everything``, all that can."""
        running = {s.answer_id for s in self._scheduler.running.values() if s.answer_id}
        present = running | self._complete.keys()
        before, self._reported = set() if everything else self._reported, present
        return b"".join(sorted(present - before)), b"".join(sorted(before - present))

    def _forget(self, answer_id: bytes) -> None:
        answer = self._complete.pop(answer_id, None)
        if answer is not None:
            self._num_tokens -= len(answer.tokens)


def resumed(order: Resume, tokens: list[int], reason: FinishReason | None) -> list[StepTokens]:
    """Return the messages with all tokens of an answer. ``reason``: why it has ended; None: it has not."""
    messages = []
    for first in range(0, len(tokens), MAX_TOKENS_A_MESSAGE):
        part = tokens[first : first + MAX_TOKENS_A_MESSAGE]
        ends = reason is not None and first + len(part) == len(tokens)
        messages.append(
            StepTokens(
                coordinator=order.coordinator,
                dispatches=u32([order.dispatch] * len(part)),
                indices=u32(list(range(first, first + len(part)))),
                tokens=u32(part),
                finished={len(part) - 1: reason} if ends and reason is not None else {},
            )
        )
    return messages
