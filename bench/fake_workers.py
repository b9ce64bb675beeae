"""A prefill and a decode worker without engine or caches: they speak the real protocol to a real coordinator,
and answer at once."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..transport.channels.channels import DealerChannel
from ..transport.channels.coordinator_link import identity_of
from ..transport.messages.cache_map import states
from ..transport.messages.fields import incarnations
from ..transport.messages.messages import (
    FROM_COORDINATOR,
    Cancel,
    FinishReason,
    FirstToken,
    Hello,
    Joined,
    Load,
    Message,
    ModelIdentity,
    Prefill,
    Role,
    StepTokens,
    Welcome,
    from_u32,
)

HEARTBEAT_S = 0.2
NUM_BLOCKS = 1 << 23
MODEL = ModelIdentity(kv_name="fake", dtype="none", block_size=16, cache_map=states(1, 1), block_bytes=1)
Numbers = NDArray[np.uint32]


def fake_hello(name: str, role: Role, incarnation: int, **sizes: int) -> Hello:
    """Return the Hello of a played worker."""
    return Hello(
        worker_id=name,
        incarnation=incarnation,
        role=role,
        host="fake",
        pid=os.getpid(),
        model=MODEL,
        max_model_len=1 << 20,
        vocab_size=1 << 20,
        peer_address="tcp://127.0.0.1:1" if role == "decode" else "",
        **sizes,  # type: ignore[arg-type]
    )


class Rows:
    """The sequences of a decode worker. ``num_steps``: those that it has made."""

    def __init__(self) -> None:
        self.dispatches: Numbers = np.zeros(0, dtype="<u4")
        self._next: Numbers = np.zeros(0, dtype="<u4")  # index of each sequence's next token
        self._limits: Numbers = np.zeros(0, dtype="<u4")
        self.num_steps = 0

    def __len__(self) -> int:
        return len(self.dispatches)

    def begin(self, message: Prefill, tokens: Numbers) -> tuple[FirstToken, Joined | None]:
        """Answer a prompt: its first token and, if more follow, the message that its sequence is here."""
        spec = message.spec
        index, limit = spec.num_tokens - spec.num_prompt_tokens, spec.sampling.max_tokens
        owner, token, only = spec.coordinator, int(tokens[index % len(tokens)]), index + 1 >= limit
        first = FirstToken(
            coordinator=owner,
            dispatch=spec.dispatch,
            index=index,
            token=token,
            finished="length" if only else None,
        )
        if only:
            return first, None
        self.dispatches = np.append(self.dispatches, np.uint32(spec.dispatch))
        self._next = np.append(self._next, np.uint32(index + 1))
        self._limits = np.append(self._limits, np.uint32(limit))
        return first, Joined(coordinator=owner, dispatch=spec.dispatch, index=index, token=token)

    def drop(self, message: Cancel) -> None:
        self._keep(~np.isin(self.dispatches, from_u32(message.dispatches)))

    def step(self, coordinator: int, tokens: Numbers) -> StepTokens:
        """One token of every sequence."""
        done = self._next + 1 >= self._limits
        finished: dict[int, FinishReason] = dict.fromkeys(np.flatnonzero(done).tolist(), "length")
        message = StepTokens(
            coordinator=coordinator,
            dispatches=self.dispatches.tobytes(),
            indices=self._next.tobytes(),
            tokens=tokens[self._next % len(tokens)].tobytes(),
            finished=finished,
        )
        self.num_steps += 1
        self._next += 1
        if finished:
            self._keep(~done)
        return message

    def _keep(self, rows: NDArray[np.bool_]) -> None:
        self.dispatches, self._next, self._limits = (
            self.dispatches[rows],
            self._next[rows],
            self._limits[rows],
        )


def fake_load(name: str, incarnation: int, rows: Rows, num_blocks: int, **more: object) -> Load:
    """Return the heartbeat of a played worker, which may rest between two steps as long as it likes."""
    return Load(
        worker_id=name,
        incarnation=incarnation,
        blocks_free=num_blocks,
        blocks_cached=0,
        blocks_used=0,
        blocks_leased=0,
        num_running=len(rows),
        num_waiting=0,
        num_waiting_tokens=0,
        steps=rows.num_steps,
        busy=False,
        accepting=True,
        dispatches=rows.dispatches.tobytes(),
        **more,  # type: ignore[arg-type]
    )


class FakeWorkers:
    """Both workers, driven by hand: ``poll`` takes requests in and gives first tokens, ``step`` is one decode
    step of all."""

    def __init__(self, coordinator: str, tokens: Sequence[int]) -> None:
        """``tokens``: the output of every sequence, repeated."""
        self._incarnation = incarnations()()
        self._coordinator = 0
        self._tokens = np.array(tokens, dtype="<u4")
        self._channels: dict[Role, DealerChannel] = {
            role: self._connect(coordinator, role) for role in ("prefill", "decode")
        }
        self._heartbeat_at = 0.0
        self._rows: dict[Role, Rows] = {"prefill": Rows(), "decode": Rows()}

    @property
    def dispatches(self) -> Numbers:
        """The sequences that generate."""
        return self._rows["decode"].dispatches

    def poll(self) -> None:
        """Handle the coordinator's messages, and send heartbeats when they are due."""
        rows = self._rows["decode"]
        for role, channel in self._channels.items():
            firsts: list[Message] = []
            for message in channel.receive(256):
                if isinstance(message, Welcome):
                    self._coordinator = message.coordinator
                elif isinstance(message, Prefill):
                    first, joined = rows.begin(message, self._tokens)
                    firsts.append(first)
                    if joined is not None:
                        self._channels["decode"].send(joined)
                elif isinstance(message, Cancel) and role == "decode":
                    rows.drop(message)
            if firsts:
                channel.send(*firsts)
        if time.monotonic() >= self._heartbeat_at:
            self._heartbeat_at = time.monotonic() + HEARTBEAT_S
            for role, channel in self._channels.items():
                channel.send(fake_load(role, self._incarnation, self._rows[role], NUM_BLOCKS))

    def step(self) -> int:
        """One token of every sequence; returns how many."""
        count = len(self.dispatches)
        self._channels["decode"].send(self._rows["decode"].step(self._coordinator, self._tokens))
        return count

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _connect(self, coordinator: str, role: Role) -> DealerChannel:
        channel = DealerChannel.connect(
            coordinator, identity_of(role, self._incarnation), None, FROM_COORDINATOR
        )
        sizes = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 1 << 16, "max_batch_tokens": 1 << 20}
        channel.send(fake_hello(role, role, self._incarnation, **sizes))
        return channel
