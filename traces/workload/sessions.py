"""Sessions: conversations of several turns, each of whose prompts holds all before it, over system prompts
that many sessions share.

A turn's prompt is the system prompt, the earlier turns' new tokens and answers, and this turn's new tokens.
Blocks of the system prompt have the same hashes in all sessions that use it; the other blocks belong to their
session, and stay the same from turn to turn: what a prefix cache could reuse is exactly what a real
conversation would let it reuse. The next turn comes a think time after the last one's arrival, however long
the answer takes (the load is open: a slow server does not slow its clients).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..request import TraceRequest

INDEX_BITS = 32  # of a block hash; the bits above name the block's owner


class Sessions(BaseModel):
    """How conversations go on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: float = Field(default=1.0, ge=1, le=10_000, description="Mean turns of a session (geometric).")
    think_s: float = Field(
        default=30.0,
        ge=0,
        le=1e6,
        description="Mean seconds from one turn's arrival to the next's (exponential).",
    )
    system_prompts: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Different system prompts; the k-th is used 1/k as often as the first.",
    )
    system_prompt_len: int = Field(default=512, ge=1, le=1 << 20, description="Tokens of a system prompt.")
    block_size: int = Field(
        default=16, ge=1, le=1 << 16, description="Tokens that one block hash stands for."
    )
    max_len: int = Field(
        default=1 << 20,
        ge=2,
        le=1 << 20,
        description="A session ends before prompt and output would be longer.",
    )

    @model_validator(mode="after")
    def _room_for_a_turn(self) -> Sessions:
        if self.system_prompts and self.system_prompt_len + 2 > self.max_len:
            raise ValueError("max_len must leave room for two tokens after system_prompt_len")
        return self


@dataclass(slots=True)
class _Session:
    number: int
    system: int  # which system prompt; -1: none
    num_tokens: int  # of the conversation so far, the system prompt included


def draw_sessions(
    sessions: Sessions, starts: Iterator[float], lengths: Iterator[tuple[int, int]], rng: np.random.Generator
) -> Iterator[TraceRequest]:
    """Requests in order of arrival, without end; ``lengths``: new prompt tokens and output tokens of each
    turn."""
    popularity = np.cumsum(1 / np.arange(1, sessions.system_prompts + 1))
    waiting: list[tuple[float, int, _Session]] = []  # the next turns; numbers settle ties
    number = 0
    next_start = next(starts)
    while True:
        if not waiting or next_start <= waiting[0][0]:
            system = (
                int(np.searchsorted(popularity, rng.random() * popularity[-1], "right"))
                if len(popularity)
                else -1
            )
            session = _Session(number, system, sessions.system_prompt_len if system >= 0 else 0)
            arrival_s, next_start = next_start, next(starts)
            number += 1
        else:
            arrival_s, _, session = heapq.heappop(waiting)
        request = _turn(sessions, session, arrival_s, *next(lengths))
        if request is not None:
            yield request
            if rng.random() >= 1 / sessions.turns:
                heapq.heappush(
                    waiting, (arrival_s + sessions.think_s * rng.exponential(), session.number, session)
                )


def _turn(
    sessions: Sessions, session: _Session, arrival_s: float, num_new_tokens: int, num_output_tokens: int
) -> TraceRequest | None:
    """The session's next request; None if it would be too long. The first turn is made to fit: every session
    has one."""
    room = sessions.max_len - session.num_tokens
    is_first = session.num_tokens == (sessions.system_prompt_len if session.system >= 0 else 0)
    if num_new_tokens + num_output_tokens > room:
        if not is_first:
            return None
        num_new_tokens = min(num_new_tokens, room - 1)
        num_output_tokens = min(num_output_tokens, room - num_new_tokens)
    num_prompt_tokens = session.num_tokens + num_new_tokens
    session.num_tokens = num_prompt_tokens + num_output_tokens
    hashes = _block_hashes(sessions, session, num_prompt_tokens)
    return TraceRequest(arrival_s, num_prompt_tokens, num_output_tokens, hashes, str(session.number))


def _block_hashes(sessions: Sessions, session: _Session, num_prompt_tokens: int) -> tuple[int, ...]:
    """Hashes of the full blocks: those within the system prompt are shared, the others the session's."""
    num_blocks = num_prompt_tokens // sessions.block_size
    num_shared = sessions.system_prompt_len // sessions.block_size if session.system >= 0 else 0
    shared, own = (2 * session.system) << INDEX_BITS, (2 * session.number + 1) << INDEX_BITS
    return tuple((shared if index < num_shared else own) + index for index in range(num_blocks))
