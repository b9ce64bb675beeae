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
        self._steps = 0
        self.dispatches: NDArray[np.uint32] = np.zeros(0, dtype="<u4")
        self._next: NDArray[np.uint32] = np.zeros(0, dtype="<u4")  # index of each sequence's next token
        self._limits: NDArray[np.uint32] = np.zeros(0, dtype="<u4")

    def poll(self) -> None:
        """Handle the coordinator's messages, and send heartbeats when they are due."""
        for role, channel in self._channels.items():
            firsts: list[Message] = []
            for message in channel.receive(256):
                if isinstance(message, Welcome):
                    self._coordinator = message.coordinator
                elif isinstance(message, Prefill):
                    firsts.append(self._prefill(message))
                elif isinstance(message, Cancel) and role == "decode":
                    self._keep(~np.isin(self.dispatches, from_u32(message.dispatches)))
            if firsts:
                channel.send(*firsts)
        if time.monotonic() >= self._heartbeat_at:
            self._heartbeat_at = time.monotonic() + HEARTBEAT_S
            for role, channel in self._channels.items():
                channel.send(self._load(role))

    def step(self) -> int:
        """One token of every sequence; returns how many."""
        count = len(self.dispatches)
        done = self._next + 1 >= self._limits
        finished: dict[int, FinishReason] = dict.fromkeys(np.flatnonzero(done).tolist(), "length")
        message = StepTokens(
            coordinator=self._coordinator,
            dispatches=self.dispatches.tobytes(),
            indices=self._next.tobytes(),
            tokens=self._tokens[self._next % len(self._tokens)].tobytes(),
            finished=finished,
        )
        self._channels["decode"].send(message)
        self._steps += 1
        self._next += 1
        if finished:
            self._keep(~done)
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

    def _load(self, role: Role) -> Load:
        return Load(
            worker_id=role,
            incarnation=self._incarnation,
            blocks_free=NUM_BLOCKS,
            blocks_cached=0,
            blocks_used=0,
            blocks_leased=0,
            num_running=len(self.dispatches) if role == "decode" else 0,
            num_waiting=0,
            num_waiting_tokens=0,
            steps=self._steps,
            busy=False,
            accepting=True,
            dispatches=self.dispatches.tobytes() if role == "decode" else b"",
        )

    def _prefill(self, message: Prefill) -> FirstToken:
        spec = message.spec
        index = spec.num_tokens - spec.num_prompt_tokens
        token = int(self._tokens[index % len(self._tokens)])
        only = index + 1 >= spec.sampling.max_tokens
        first = FirstToken(
            coordinator=spec.coordinator,
            dispatch=spec.dispatch,
            index=index,
            token=token,
            finished="length" if only else None,
        )
        if not only:
            joined = Joined(coordinator=spec.coordinator, dispatch=spec.dispatch, index=index, token=token)
            self._channels["decode"].send(joined)
            self.dispatches = np.append(self.dispatches, np.uint32(spec.dispatch))
            self._next = np.append(self._next, np.uint32(index + 1))
            self._limits = np.append(self._limits, np.uint32(spec.sampling.max_tokens))
        return first

    def _keep(self, rows: NDArray[np.bool_]) -> None:
        self.dispatches, self._next, self._limits = (
            self.dispatches[rows],
            self._next[rows],
            self._limits[rows],
        )
