"""Stands for many StepTokens in virtual time, where a message per step would be most of the work. Never sent."""

from __future__ import annotations

from typing import NamedTuple

from .parts import FinishReason


class TokenRun(NamedTuple):
    """Output tokens of one dispatch, from index ``first`` on."""

    dispatch: int
    first: int
    token_ids: list[int]
    finished: FinishReason | None  # the last of them ended the sequence
    decode_s: float  # from its join to its end


class TellTokens(NamedTuple):
    """The tokens of the steps that a decode worker has skipped over, for one coordinator."""

    coordinator: int
    runs: list[TokenRun]
