"""What a decode worker reports: its load, the changes of its prefix cache, and the tokens of its steps. Pure.

All tokens of a step are one message of columns; where several coordinators have sequences in it, each gets
its own rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..engine.cache.block_manager import has_spare
from ..transport.handoff.protocol import Key
from ..transport.handoff.receiver import HandoffReceiver
from ..transport.messages.messages import FinishReason, Load, PeerId, StepTokens, TokenLogprobs, u32
from ..transport.process.reports import CacheReporter
from .answers import Answers
from .moving import Moving
from .rows import DecodeResult
from .scheduler import DecodeScheduler


@dataclass(slots=True)
class DraftCounts:
    """Drafted tokens, and those of them that were right."""

    num_tokens: int = 0
    num_accepted: int = 0

    def count(self, accepted: bool) -> None:
        """Count one more."""
        self.num_tokens += 1
        self.num_accepted += accepted


class Heartbeat:
    """Counts steps; reads everything else from the scheduler and the handoff."""

    def __init__(
        self, scheduler: DecodeScheduler, receiver: HandoffReceiver, moving: Moving, answers: Answers
    ) -> None:
        self._scheduler, self._receiver, self._moving = scheduler, receiver, moving
        self.cache = CacheReporter(scheduler.blocks, answers.changes)
        self._num_steps = 0
        self._num_step_sequences = 0
        self._num_tokens = 0
        self._drafted = DraftCounts()
        self._drafted_by_model = DraftCounts()
        self._largest_batch = 0

    def count_step(self, result: DecodeResult) -> None:
        """Count a step that has run, and its tokens that are reported to a coordinator."""
        step, num_seqs = result.step, len(result.step.members)
        self._num_steps += 1
        self._num_step_sequences += num_seqs
        self._num_tokens += len(step.sequences) - len(result.dropped)
        dropped = set(result.dropped) if step.num_draft_tokens else ()
        for row in range(num_seqs, len(step.sequences)):
            self._drafted.count(row not in dropped)
            if step.sequences[row] in step.drafts.by_model:
                self._drafted_by_model.count(row not in dropped)
        self._largest_batch = max(self._largest_batch, num_seqs)

    def load(self, worker: PeerId, held: Sequence[Key], draining: bool, coordinator: int | None) -> Load:
        """Return the load for one of several coordinators; None: for the only one. ``held``: every dispatch
        with anything here."""
        own = [dispatch for owner, dispatch in held if coordinator is None or owner == coordinator]
        b, s, r = self._scheduler.blocks, self._scheduler, self._receiver
        return Load(
            worker_id=worker[0],
            incarnation=worker[1],
            blocks_free=b.num_free,
            blocks_cached=b.num_cached,
            blocks_used=b.num_used,
            blocks_leased=r.leases.num_blocks,
            num_running=s.num_running,
            num_waiting=len(r.keys()),
            num_waiting_tokens=r.granting.num_tokens,
            steps=self._num_steps,
            busy=any(not each.state.lacks_matcher for each in s.running.values()),
            accepting=has_spare(b.num_available, b.num_blocks)
            and s.num_running + len(r.leases.granted) < s.row_limit.now,
            draining=draining,
            dispatches=u32(own),
            num_others=len(held) - len(own),
            num_cache_reports=self.cache.num_reports,
            counters={
                "preemptions": s.num_preemptions,
                "output_tokens": self._num_tokens,
                "step_sequences": self._num_step_sequences,
                "draft_tokens": self._drafted.num_tokens,
                "accepted_tokens": self._drafted.num_accepted,
                "mtp_draft_tokens": self._drafted_by_model.num_tokens,
                "mtp_accepted_tokens": self._drafted_by_model.num_accepted,
                "corrupt_blocks": r.num_corrupt_blocks,
                "handed_over": self._moving.num_moved,
                "mover_fallbacks": self._moving.sender.num_fallbacks,
            },
            gauges={"largest_batch": self._largest_batch},
        )


Entry = TypeVar("Entry")


def step_tokens(result: DecodeResult, now: float) -> list[StepTokens]:
    """Return the messages of a step that has run by ``now``. Logprobs stay with their sequence too: if it
    moves, those of its newest token move with it."""
    step, output, finished = result.step, result.output, result.finished
    logprobs: Mapping[int, TokenLogprobs] = output.logprobs
    sequences, columns = step.sequences, [step.dispatches, step.indices, output.token_ids.astype(np.uint32)]
    seconds = {row: max(0.0, now - sequences[row].joined_at) for row in finished}
    if result.dropped:
        dropped = set(result.dropped)
        rows = [row for row in range(len(sequences)) if row not in dropped]
        sequences, columns = [sequences[row] for row in rows], [column[rows] for column in columns]
        finished, logprobs, seconds = _only(rows, finished), _only(rows, logprobs), _only(rows, seconds)
    for row, entry in logprobs.items():
        sequences[row].last_logprobs = entry
    owners = {sequence.key[0] for sequence in sequences}
    if len(owners) == 1:
        return [_step_tokens(owners.pop(), columns, finished, logprobs, seconds)]
    messages = []
    for owner in owners:
        rows = [row for row, sequence in enumerate(sequences) if sequence.key[0] == owner]
        theirs = [column[rows] for column in columns]
        messages.append(
            _step_tokens(owner, theirs, _only(rows, finished), _only(rows, logprobs), _only(rows, seconds))
        )
    return messages


def _step_tokens(
    coordinator: int,
    columns: Sequence[np.ndarray[Any, Any]],
    finished: Mapping[int, FinishReason],
    logprobs: Mapping[int, TokenLogprobs],
    decode_s: Mapping[int, float],
) -> StepTokens:
    """Columns: dispatches, indices, tokens, uint32 each."""
    dispatches, indices, tokens = (column.tobytes() for column in columns)
    return StepTokens(
        coordinator=coordinator,
        dispatches=dispatches,
        indices=indices,
        tokens=tokens,
        finished=dict(finished),
        logprobs=dict(logprobs),
        decode_s=dict(decode_s),
    )


def _only(rows: Sequence[int], entries: Mapping[int, Entry]) -> dict[int, Entry]:
    """Return the entries of these rows, by their new places."""
    return {place: entries[row] for place, row in enumerate(rows) if row in entries} if entries else {}
