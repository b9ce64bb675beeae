"""The tokens of decode steps as messages to coordinators. Pure.

All tokens of a step are one message of columns; where several coordinators have sequences in it, each gets
its own rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ..transport.messages.messages import FinishReason, StepTokens, TokenLogprobs
from .scheduler import DecodeResult

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
