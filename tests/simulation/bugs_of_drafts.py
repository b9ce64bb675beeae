"""Bugs for test_teeth.py, put into what is drafted and what is made of it.

A sequence that keeps its drafts while it is paused is not here: they still follow its newest token, and it
seldom comes back. (It was tried: nothing was found in 6,000 requests.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from splitserve.decode import drafts
from splitserve.decode.drafts import Drafts
from splitserve.decode.rows import DecodeRows, DecodeStep
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.decode.text_match import TextMatch
from splitserve.prefill.chunks import Chunk

Patch = pytest.MonkeyPatch


def draft_beyond_an_end_token(patch: Patch) -> None:
    draft = TextMatch.draft
    patch.setattr(TextMatch, "draft", lambda self, count, stops: draft(self, count, frozenset()))


def take_every_draft_for_accepted(patch: Patch) -> None:
    settle = DecodeRows.settle

    def broken(self: Any, step: Any, token_ids: Any) -> None:
        settle(self, replace(step, num_draft_tokens=0), token_ids)

    patch.setattr(DecodeRows, "settle", broken)


def take_a_chunks_last_token_for_the_next(patch: Patch) -> None:
    patch.setattr(Chunk, "next_id", property(lambda self: -1 if self.is_last else int(self.token_ids[-1])))


# --- of the model ----------------------------------------------------------------------------------


def believe_a_draft_of_the_model_without_a_check(patch: Patch) -> None:
    complete = DecodeScheduler.complete

    def broken(self: Any, step: Any, output: Any) -> Any:
        tokens, num_seqs = output.token_ids.copy(), len(step.members)
        for row, sequence in list(enumerate(step.sequences))[num_seqs:]:
            if sequence in step.drafts.by_model:
                tokens[step.batch.draft_of[row]] = step.batch.token_ids[row]
        return complete(self, step, replace(output, token_ids=tokens))

    patch.setattr(DecodeScheduler, "complete", broken)


def keep_drafts_over_a_step_that_failed(patch: Patch) -> None:
    after_failure = DecodeScheduler._after_failure

    def broken(self: Any, step: Any) -> None:
        after_failure(self, step)
        for sequence, tokens in step.drafts.made.items():
            sequence.model_drafts.tokens = tokens

    patch.setattr(DecodeScheduler, "_after_failure", broken)


def take_the_drafts_of_a_row_that_was_rejected(patch: Patch) -> None:
    book = Drafts.book

    def broken(self: Any, result: Any) -> None:
        book(self, result)
        for row, tokens in result.output.drafts.items():
            if row in result.dropped and (own := result.step.sequences[row].model_drafts) is not None:
                own.tokens = tokens

    patch.setattr(Drafts, "book", broken)


def take_the_drafts_of_the_first_row(patch: Patch) -> None:
    """Others of the sequence may have been accepted behind it."""
    book = Drafts.book

    def broken(self: Any, result: Any) -> None:
        num_seqs = len(result.step.members)
        drafted = {row: tokens for row, tokens in result.output.drafts.items() if row < num_seqs}
        book(self, replace(result, output=replace(result.output, drafts=drafted)))
        for row, tokens in drafted.items():
            if (own := result.step.sequences[row].model_drafts) is not None:
                own.tokens = tokens

    patch.setattr(Drafts, "book", broken)


def ask_for_more_than_there_are_slots(patch: Patch) -> None:
    def broken(self: Any, step: Any, asked: Any) -> Any:
        counts = np.array([asked.get(sequence, 0) for sequence in step.sequences], np.int32)
        return replace(step, batch=replace(step.batch, num_drafts=counts))

    patch.setattr(DecodeRows, "_with_num_drafts", broken)


def follow_an_end_token_that_the_model_drafts(patch: Patch) -> None:
    patch.setattr(drafts, "_before", lambda tokens, stops: tokens)


def make_a_step_ahead_of_drafts(patch: Patch) -> None:
    patch.setattr(DecodeStep, "is_awaited", property(lambda self: self.num_draft_tokens > 0))


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (take_a_chunks_last_token_for_the_next, "drafts of the model"),
    (draft_beyond_an_end_token, "drafts in a window"),
    (take_every_draft_for_accepted, "drafts"),
    (believe_a_draft_of_the_model_without_a_check, "drafts of the model"),
    (keep_drafts_over_a_step_that_failed, "drafts of the model"),
    (take_the_drafts_of_a_row_that_was_rejected, "drafts of the model"),
    (take_the_drafts_of_the_first_row, "drafts of the model"),
    (ask_for_more_than_there_are_slots, "drafts of the model"),
    (follow_an_end_token_that_the_model_drafts, "drafts of the model"),
    (make_a_step_ahead_of_drafts, "drafts of the model"),
]
"""Each with the scenario in which it is found quickly."""
