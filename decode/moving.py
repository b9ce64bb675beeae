"""Sequences that leave this decode worker for another one, with their KV blocks. Pure.

    runs --Move--> paused: out of the batch, keeps its blocks --offer, puts, Handoff--> Ack: it runs there now
                      \\--refused, cancelled, no answer in time--> runs on here

To the other worker it looks like a prompt that a prefill worker hands over: its blocks are kept here too,
until they have been verified there."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from ..engine.role_core import failed
from ..transport.handoff.prefixes import PrefixSender
from ..transport.handoff.protocol import (
    Delivered,
    HandoffTimes,
    Key,
    SenderAction,
    ToCoordinator,
    Undelivered,
)
from ..transport.handoff.sender import HandoffSender
from ..transport.messages.blocks import chain, root_hash
from ..transport.messages.messages import Meet, Message, Move, PeerId, u32
from .scheduler import DecodeScheduler
from .sequences import DecodeSequence

TIMES = HandoffTimes(resend=0.25, grant=2.0, ack=5.0)
"""Short, because the stream stands still meanwhile."""


@dataclass(slots=True)
class _Leaving:
    """``here``: under which dispatch it runs here; it is to run on as ``order.spec.dispatch``."""

    here: Key
    order: Move
    offered: bool = False


class Moving:
    """Joins the batch scheduler and a sender of the handoff."""

    def __init__(self, meet: Meet, scheduler: DecodeScheduler, tests_movers: bool) -> None:
        self.sender = HandoffSender(meet, TIMES, test_blocks=scheduler.blocks if tests_movers else None)
        self.prefixes = PrefixSender(
            self.sender, scheduler.blocks, scheduler.block_size, lambda: scheduler.num_running
        )
        self._scheduler, self._kv_name = scheduler, meet.model.kv_name
        self._leaving: dict[Key, _Leaving] = {}  # by the dispatch it will have there
        self.num_moved = 0

    def keys(self) -> list[Key]:
        """The dispatches under which sequences will go on elsewhere."""
        return list(self._leaving)

    def begin(self, order: Move) -> None:
        """Begin to move a sequence. An unknown one has ended, or is moving already."""
        here, there = (order.spec.coordinator, order.dispatch), (order.spec.coordinator, order.spec.dispatch)
        if self._scheduler.get(here) is not None and there not in self._leaving:
            self._leaving[there] = _Leaving(here, order)
            self._scheduler.pause(here)

    @property
    def has_actions(self) -> bool:
        """Whether ``advance`` or ``take`` may have something to do."""
        return bool(self._leaving) or self.sender.has_actions

    def advance(self, now: float) -> None:
        """Offers what has come to rest since; forgets what has ended."""
        for there, leaving in list(self._leaving.items()):
            sequence = self._scheduler.get(leaving.here)
            if sequence is None:
                self._forget(there)
            elif not leaving.offered and not sequence.in_flight:
                leaving.offered = True
                self._offer(there, leaving, sequence, now)

    def cancel(self, key: Key) -> None:
        """The coordinator has dropped this dispatch. If it names a move, the sequence runs on here."""
        leaving = self._leaving.get(key)
        if leaving is not None:
            self._forget(key)
            self._resume(leaving)

    def receive(self, peer: PeerId, message: Message, now: float) -> None:
        """Any message of another decode worker."""
        self.sender.receive(peer, message, now)

    def tick(self, now: float) -> None:
        """At least ten times a second."""
        self.advance(now)
        self.sender.tick(now)

    def rename(self, meet: Meet) -> None:
        """A new incarnation: all moves of the old one are over."""
        self._leaving.clear()
        self.prefixes.cancel_all()
        self.sender.rename(meet)

    def take(self) -> list[ToCoordinator | SenderAction]:
        """What is to be done since the last call, in order."""
        actions: list[ToCoordinator | SenderAction] = []
        for action in self.sender.take():
            if isinstance(action, Delivered | Undelivered) and self.prefixes.end(action.key):
                continue
            if isinstance(action, Delivered):
                self._arrived(action.key)
            elif isinstance(action, Undelivered):
                self.cancel(action.key)
                actions.append(failed(action.key, action.kind, action.message))
            else:
                actions.append(action)
        return actions

    def _arrived(self, there: Key) -> None:
        leaving = self._leaving.pop(there, None)
        if leaving is not None:
            self._scheduler.drop(leaving.here)
            self.num_moved += 1

    def _offer(self, there: Key, leaving: _Leaving, sequence: DecodeSequence, now: float) -> None:
        """All its tokens but the newest are in its blocks; the newest travels as a first token does."""
        state, order, deadline_s = sequence.state, leaving.order, max(0.0, sequence.deadline - now)
        tokens = u32([*state.prompt_token_ids, *state.output_token_ids[:-1]])
        spec = replace(order.spec, token_ids=tokens, prompt_logprobs=None, deadline_s=deadline_s)
        hashes = chain(root_hash(self._kv_name, spec.salt, spec.adapter), tokens, self._scheduler.block_size)
        blocks = sequence.blocks[: -(-spec.num_tokens // self._scheduler.block_size)]  # more: a step raised
        blocks += sequence.states[spec.num_tokens % 2]
        self.sender.offer(order.decode, spec, len(blocks), hashes, now)
        self.sender.finish(there, blocks, state.output_token_ids[-1], sequence.last_logprobs, now)

    def _resume(self, leaving: _Leaving) -> None:
        if self._scheduler.get(leaving.here) is not None:
            self._scheduler.resume(leaving.here)

    def _forget(self, there: Key) -> None:
        del self._leaving[there]
        self.sender.abandon(there)
