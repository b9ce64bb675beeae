"""The prefill worker's side of the KV handoff (the protocol is drawn in protocol.py). Pure.

Meetings (meetings.py) agrees with each decode worker on a mover; Outgoing (outgoing.py) is the handoff of one
prompt. This file finds the one that an event concerns, and keeps the deadlines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..messages.blocks import num_behind
from ..messages.messages import (
    Ack,
    FailureKind,
    Grant,
    Meet,
    Message,
    Met,
    Nack,
    OtherVersion,
    Peer,
    PeerId,
    Refuse,
    Release,
    Renew,
    RequestSpec,
    Retired,
    Revoke,
    TokenLogprobs,
    u64,
)
from .granting import BlockPool
from .layer_slicing import WHOLE_BLOCKS, LayerSlicing
from .meetings import Contact, Meetings
from .mover_tests import MoverTests
from .outgoing import Outgoing
from .protocol import CloseMover, Delivered, HandoffTimes, Key, SenderAction, ToPeer, Undelivered, Wait


class HandoffSender:
    """All handoffs of a prefill worker. Feed it events, then carry out what ``take`` returns."""

    def __init__(
        self,
        meet: Meet,
        times: HandoffTimes | None = None,
        slicing: LayerSlicing = WHOLE_BLOCKS,
        test_blocks: BlockPool | None = None,
    ) -> None:
        """``test_blocks``: where the block comes from by which each mover is tested; None: none is."""
        self._model, self._slicing = meet.model, slicing
        self._times = times or HandoffTimes()
        self._actions: list[SenderAction] = []
        self._to_offer: list[Outgoing] = []
        self.outgoing: dict[Key, Outgoing] = {}
        self.meetings = Meetings(meet, self._actions)
        self.tests = MoverTests(test_blocks, self._times, self._actions)
        self._incarnation = meet.incarnation
        self.num_fallbacks = 0

    def rename(self, meet: Meet) -> None:
        """Go on under a new incarnation: end everything under the old one."""
        self.retire()
        self._model, self._incarnation = meet.model, meet.incarnation
        self.meetings.rename(meet)

    def retire(self) -> None:
        """Write nothing more under this name. ``meetings.retirement`` is complete once no decode worker holds
        blocks for it."""
        for key in list(self.outgoing):
            self.abandon(key)
        for test in list(self.tests.running.values()):
            self.tests.end(test, has_passed=False)
        self.meetings.retire()

    def waits(self) -> Iterator[Wait]:
        """Yield every handoff that waits for its peer. (The others wait for their own prompt.)"""
        for out in self.outgoing.values():
            if out.waits_for_peer:
                yield Wait(out.key, "the receiving worker's answer", out.deadline)
        for test in self.tests.running.values():
            yield Wait(test.key, "the end of a mover's self-test", test.deadline)

    @property
    def has_actions(self) -> bool:
        """Whether ``take`` would return any action."""
        return bool(self._actions or self._to_offer) or self.tests.has_ended

    def take(self) -> list[SenderAction]:
        """Return the actions since the last call, in order."""
        self.tests.free_ended()
        offered, self._to_offer = self._to_offer, []
        for out in offered:
            if self.outgoing.get(out.key) is out and out.grant is None:
                out.send(out.sent_at)
        actions = self._actions[:]
        self._actions.clear()
        return actions

    def offer(
        self,
        peer: Peer,
        spec: RequestSpec,
        num_blocks: int,
        hashes: list[bytes],
        now: float,
        is_prefix: bool = False,
    ) -> None:
        """Ask for room: a prompt's first chunk is about to run. (The message is made only in ``take``, when
        the step has begun.) ``is_prefix``: cached blocks for a prefill worker."""
        contact = self.meetings.meet(peer)
        out = Outgoing(
            contact,
            spec,
            num_blocks,
            hashes,
            self._slicing,
            self._times,
            self._actions,
            now,
            False,
            is_prefix,
        )
        self.outgoing[out.key] = out
        if contact.met is None:
            self._greet(now)
        elif contact.is_tested:
            self._to_offer.append(out)

    def blocks_ready(self, key: Key, blocks: list[int], num_ready: int) -> None:
        """The first ``num_ready`` of the prompt's own ``blocks`` have their final content."""
        if (out := self.outgoing.get(key)) is not None:
            out.blocks_ready(blocks, num_ready)

    def layers_ready(self, key: Key, blocks: list[int], stop: int, num_layers: int) -> None:
        """A running chunk will make the first ``stop`` of the prompt's own ``blocks`` final; their first
        ``num_layers`` layers are final now. (If the first layers of other blocks have left, with a chunk that
        ran out of memory and is computed again with another size, the rest of those leaves when it is
        final.)"""
        if (out := self.outgoing.get(key)) is not None:
            out.layers_ready(blocks, stop, num_layers)

    def finish(
        self,
        key: Key,
        blocks: list[int],
        token: int,
        logprobs: TokenLogprobs | None,
        now: float,
        num_cached_tokens: int = 0,
    ) -> None:
        """The prompt is complete, with all its ``blocks``, and has its first token. ``num_cached_tokens`` of
        it were not computed."""
        if (out := self.outgoing.get(key)) is not None:
            out.finish(blocks, token, logprobs, num_cached_tokens, now)

    def abandon(self, key: Key) -> None:
        """End this handoff without a report."""
        if (out := self.outgoing.get(key)) is not None:
            self._end(out)

    def receive(self, peer: PeerId, message: Message, now: float) -> None:
        """Take a message from a decode worker."""
        if isinstance(message, Met | OtherVersion):
            result = self.meetings.receive(peer, message)
            if isinstance(result, str):
                self.peer_lost(peer, result)
            elif result is not None and not self.tests.begin(result, self._incarnation, now):
                _use(result, self.outgoing.values(), now)
        elif isinstance(message, Retired):
            self.meetings.retirement.answered(peer[0], message.incarnation)
        elif isinstance(message, Grant | Refuse | Ack | Nack | Revoke):
            key = (message.coordinator, message.dispatch)
            out = self.outgoing.get(key) or self.tests.running.get(key)
            if out is not None and out.peer == peer:
                self._on_answer(out, message, now)
            elif out is not None and isinstance(message, Revoke) and out.lease == message.lease:
                # from the same process under a new incarnation: nothing is written under this lease any more
                self._fail(out, "peer_lost", message.reason)
            elif isinstance(message, Grant | Revoke | Nack):
                release = Release(
                    lease=message.lease, coordinator=message.coordinator, dispatch=message.dispatch
                )
                self._actions.append(ToPeer(peer, release))

    def peer_lost(self, peer: PeerId, reason: str) -> None:
        """End all handoffs to a decode worker that is dead, unreachable, or whose mover failed. If it lives,
        it gets Release for their leases."""
        for test in self.tests.of(peer):
            self.tests.end(test, has_passed=False)
        for out in [o for o in self.outgoing.values() if o.peer == peer]:
            self._fail(out, "peer_lost", reason)
        self.meetings.remove(peer)

    def test_failed(self, peer: PeerId, reason: str) -> None:
        """Leave out the mover of a peer for which ``meetings.is_testing``: prompts wait for the next one.
        Where there is none they fail."""
        error = self.meetings.test_failed(peer, reason)
        self.num_fallbacks += not error
        self._actions.append(CloseMover(peer, error))
        for test in self.tests.of(peer):
            self.tests.end(test, has_passed=False)
        if error:
            self.peer_lost(peer, error)

    def mover_failed(self, peer: PeerId, reason: str) -> bool:
        """End all handoffs to this peer, which is then met anew. Return whether that will be by
        FALLBACK_MOVER; it takes the place of a mover that was forced, too."""
        falls_back = self.meetings.mover_failed(peer)
        self.num_fallbacks += falls_back
        self.peer_lost(peer, f"the KV mover failed: {reason}")
        return falls_back

    def tick(self, now: float) -> None:
        """Repeat unanswered messages, renew leases, and end handoffs that are past their deadline."""
        for out in [o for o in (*self.tests.running.values(), *self.outgoing.values()) if o.waits_for_peer]:
            if out.key not in self.outgoing and out.key not in self.tests.running:
                continue  # it has ended with another one of this peer
            if now >= out.deadline:
                self._fail(out, "handoff_failed", f"worker {out.peer[0]} did not {out.missing} in time")
            elif now - out.sent_at >= self._times.resend:
                out.send(now)
        self._greet(now)
        self._actions += _renewals((*self.tests.running.values(), *self.outgoing.values()), now)
        self.meetings.send_retire(self._times.resend, now)

    def _greet(self, now: float) -> None:
        for peer, waited_s in self.meetings.greet(self._times.resend, now):
            if waited_s > self._times.grant:
                self.peer_lost(peer, f"worker {peer[0]} did not answer in time")

    def _on_answer(self, out: Outgoing, message: Grant | Refuse | Ack | Nack | Revoke, now: float) -> None:
        if isinstance(message, Grant):
            behind = num_behind(out.spec.num_tokens, self._model.window, self._model.block_size)
            if out.grant is None and not out.granted(message, behind, now):
                self._fail(out, "handoff_failed", "the grant does not match the offer")
        elif isinstance(message, Refuse):
            self._fail(out, "refused" if message.final else "handoff_failed", message.reason)
        elif isinstance(message, Revoke):
            self._fail(out, "handoff_failed", message.reason)
        elif out.lease != message.lease:
            return
        elif isinstance(message, Nack):
            out.nacked(message, now)
        elif out.is_test:
            self.tests.end(out, has_passed=True)
            _use(out.contact, self.outgoing.values(), now)
        else:
            del self.outgoing[out.key]
            self.meetings.delivered(out.peer)
            self._actions.append(Delivered(out.key))

    def _fail(self, out: Outgoing, kind: FailureKind, reason: str) -> None:
        if out.is_test:
            if out.grant is None or kind != "handoff_failed":  # not the mover's fault
                self._actions.append(CloseMover(out.peer))
                self.peer_lost(out.peer, reason)
            else:
                self.test_failed(out.peer, reason)
            return
        self._end(out)
        self._actions.append(Undelivered(out.key, kind, reason))

    def _end(self, out: Outgoing) -> None:
        self.outgoing.pop(out.key, None)
        out.release()


def _use(contact: Contact, outgoing: Iterable[Outgoing], now: float) -> None:
    """Offer the prompts that wait for this decode worker: its mover works."""
    contact.is_tested = True
    for waiting in outgoing:
        if waiting.contact is contact:
            waiting.send(now)


def _renewals(handoffs: Iterable[Outgoing], now: float) -> list[ToPeer]:
    """Return one Renew for each peer whose leases are due."""
    due: dict[PeerId, list[Outgoing]] = {}
    for out in handoffs:
        if out.grant is not None and now - out.contact.renewed_at >= out.grant.lease_s / 3:
            due.setdefault(out.peer, []).append(out)
    for same_peer in due.values():
        same_peer[0].contact.renewed_at = now
    leases = {peer: [out.grant.lease for out in same if out.grant is not None] for peer, same in due.items()}
    return [ToPeer(peer, Renew(leases=u64(numbers))) for peer, numbers in leases.items()]
