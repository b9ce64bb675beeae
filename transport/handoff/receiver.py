"""The decode worker's side of the KV handoff (the protocol is drawn in protocol.py). Pure.

Granting (granting.py) holds the offers that wait for room, LeaseTable (leases.py) the leases, Incoming
(granting.py) the arrival of one prompt, Writers (leases.py) the prefill workers met.

A handoff is declined for these reasons only:

    answer   reason                                                  decided in
    -------  ------------------------------------------------------  -------------------------------
    Other-   the wire versions are no neighbours                     ``receive``
    Version
    Met      the models differ; no mover in common                   ``Writers.meet``
    Refuse   the prompt can never fit (final); its hashes do not     ``Granting.refusal``
             match its length; a newer epoch of it is known
    Revoke   the lease is unknown; the handoff does not match it     ``_on_handoff``
    Revoke   the lease has expired, or was cancelled                 ``LeaseTable.end_expired``, ``cancel``
    Revoke   blocks arrived corrupt twice                            ``_conclude``
    Revoke   its writer did not answer and was shut out              ``writer_shut_out``

No room is no reason: the offer waits, and the grant comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..messages.messages import (
    Handoff,
    Meet,
    Message,
    ModelIdentity,
    Nack,
    Offer,
    OtherVersion,
    PeerId,
    Placed,
    Release,
    Renew,
    Retire,
    Retired,
    from_u64,
    u32,
)
from ..movers.interface import MoverEndpoints
from .granting import BlockPool, Granting, Incoming
from .leases import LeaseTable, Writers
from .protocol import ExpectAgain, HandoffTimes, Key, PrefixOver, ReceiverAction, Supersede, ToPeer, Wait


class HandoffReceiver:
    """All handoffs to a decode worker. Feed it events, then carry out what ``take`` returns.

    ``room`` returns (free sequence slots, blocks to leave for running sequences); ``secret`` draws a grant's
    secret.
    """

    def __init__(
        self,
        worker: PeerId,
        identity: ModelIdentity,
        pool: BlockPool,
        endpoints: MoverEndpoints,
        room: Callable[[], tuple[int, int]],
        secret: Callable[[], bytes],
        times: HandoffTimes | None = None,
    ) -> None:
        self._worker = worker
        self._times = times or HandoffTimes()
        self._actions: list[ReceiverAction] = []
        self._writers = Writers(identity, endpoints, pool.num_blocks)
        self.granting = Granting(pool, identity, room, secret, self._times.lease)
        self.leases = LeaseTable(pool, self._actions)
        self.num_joining = 0  # Join actions that have not been taken: each has its row already
        self.num_corrupt_blocks = 0

    def rename(self, worker: PeerId) -> None:
        """Go on under a new incarnation: end everything under the old one."""
        for key in [*self.granting.waiting, *self.leases.granted]:
            self.cancel(key)
        self._worker = worker
        self._writers.forget_choices()

    def writers(self) -> dict[PeerId, int]:
        """Return the process ids of the prefill workers met. The shell calls ``writer_gone`` when one on this
        host ends."""
        return dict(self._writers.pids)

    def keys(self) -> list[Key]:
        """Return every dispatch that waits for room or has a lease; a self-test or a prefix is none."""
        held = (*self.granting.waiting.values(), *self.leases.granted.values())
        return [incoming.key for incoming in held if not (incoming.is_test or incoming.is_prefix)]

    def waits(self) -> Iterator[Wait]:
        """Yield every handoff here that time ends. (A lease in quarantine waits for its writer's Release or
        death, one that is being verified for this worker's own check.)"""
        for offer in self.granting.waiting.values():
            yield Wait(offer.key, "room, while its offer is repeated", offer.offered_at + self._times.waiting)
        for incoming in self.leases.granted.values():
            if not incoming.verifying:
                yield Wait(incoming.key, "blocks, under a lease", incoming.expires)

    @property
    def has_actions(self) -> bool:
        """Whether ``take`` would return any action."""
        return bool(self._actions)

    def take(self) -> list[ReceiverAction]:
        """Return the actions since the last call, in order."""
        actions, self.num_joining = self._actions[:], 0
        self._actions.clear()
        return actions

    def receive(self, peer: PeerId, message: Message, now: float) -> None:
        """Take a message from a prefill worker."""
        if isinstance(message, Meet):
            if not self._writers.has_retired(peer):  # else an echo
                for earlier in self._writers.retire(peer, peer[1] - 1):
                    self.writer_gone(earlier)
                self._actions.append(ToPeer(peer, self._writers.meet(peer, message, self._worker)))
        elif isinstance(message, OtherVersion):  # a Meet
            self._actions.append(ToPeer(peer, OtherVersion()))
        elif isinstance(message, Offer):
            self._on_offer(peer, message, now)
        elif isinstance(message, Renew):
            for lease in from_u64(message.leases):
                if (incoming := self.leases.of(lease, peer)) is not None:
                    incoming.expires = now + self._times.lease
        elif isinstance(message, Placed):
            incoming = self.leases.of(message.lease, peer)
            if incoming is not None and incoming.handoff is None and not incoming.retried:
                incoming.add_checksums(message.first, from_u64(message.checksums))
                self._check(incoming)
        elif isinstance(message, Handoff):
            self._on_handoff(peer, message, now)
        elif isinstance(message, Release):
            waiting = self.granting.waiting.get((message.coordinator, message.dispatch))
            if waiting is not None and waiting.peer == peer:
                del self.granting.waiting[waiting.key]
            self.leases.release(message.lease, peer)
            if not message.lease:
                self._actions.append(PrefixOver((message.coordinator, message.dispatch), came=False))
        elif isinstance(message, Retire):
            for ended in self._writers.retire(peer, message.incarnation):
                self.writer_gone(ended)
            self._actions.append(ToPeer(peer, Retired(incarnation=message.incarnation)))

    def arrived(self, lease: int, position: int) -> None:
        """Note that a two-sided mover has written this block."""
        if (incoming := self.leases.by_lease.get(lease)) is not None:
            incoming.arrive((position,))
            self._check(incoming)

    def verified(self, lease: int, positions: list[int], wrong: list[int], now: float) -> None:
        """Take the result of (a part of) a Verify: ``wrong`` are the corrupt ones of ``positions``."""
        if (incoming := self.leases.by_lease.get(lease)) is not None:
            incoming.checked(positions, wrong)
            self.num_corrupt_blocks += len(wrong)
            self._conclude(incoming, now)

    def cancel(self, key: Key) -> None:
        """Drop this dispatch."""
        self.granting.waiting.pop(key, None)
        if key in self.leases.granted:
            self.leases.end(self.leases.granted[key], "the request was cancelled")

    def writer_gone(self, peer: PeerId) -> None:
        """End all of this prefill worker's handoffs: its process or its name has ended, and nothing of it can
        be written any more."""
        for incoming in [*self.granting.waiting.values(), *self.leases.granted.values()]:
            if incoming.peer == peer:
                self.cancel(incoming.key)
        self.leases.free_of_writer(peer)
        self._writers.forget(peer)

    def silent_writers(self, now: float) -> set[PeerId]:
        """Return the writers that have not answered Revoke for long. The shell may shut them out, and then
        calls ``writer_shut_out``."""
        return self.leases.quarantine.silent_writers(self._times.silence, now)

    def writer_shut_out(self, peer: PeerId) -> None:
        """End this peer's one-sided leases and free their blocks: none of the puts that it has begun lands
        any more, dead or not."""
        for incoming in [i for i in self.leases.granted.values() if i.peer == peer and i.one_sided]:
            self.leases.end(incoming, "its writer was shut out, which did not answer")
        self.leases.free_of_writer(peer)

    def tick(self, now: float) -> None:
        """End expired leases, forget silent offers, grant what has room now."""
        self.granting.forget_silent(self._times.waiting, now)
        self.leases.end_expired(now)
        self.leases.ask_writers(self._times.resend, now)
        self.grant_waiting(now)

    def grant_waiting(self, now: float) -> None:
        """Grant offers in order of arrival, until one has no room."""
        while (incoming := self.granting.grant_next(self._worker[1], now)) is not None:
            incoming.mover = self._writers.movers.get(incoming.peer, "")
            self.leases.grant(incoming)

    def _on_offer(self, peer: PeerId, offer: Offer, now: float) -> None:
        key = (offer.coordinator, offer.dispatch)
        if peer not in self._writers.movers:
            return  # not met: the sender meets this worker anew after its deadline
        known = self.leases.granted.get(key)
        if known is not None and known.grant is not None:
            self._actions.append(ToPeer(peer, known.grant))
        elif key in self.granting.waiting:
            self.granting.waiting[key].offered_at = now
        elif key in self.leases.joined:
            return
        elif (refusal := self.granting.refusal(offer, self._worker[0])) is not None:
            self._actions.append(ToPeer(peer, refusal))
        else:
            for incoming in [*self.granting.waiting.values(), *self.leases.granted.values()]:
                if incoming.request_id == offer.request_id:
                    self.cancel(incoming.key)
                    self._actions.append(Supersede(incoming.key))
            self.granting.add(peer, offer, now)
            self.grant_waiting(now)

    def _on_handoff(self, peer: PeerId, message: Handoff, now: float) -> None:
        key = (message.spec.coordinator, message.spec.dispatch)
        if self.leases.joined.get(key) == message.lease:
            self.leases.acknowledge(key, message.lease, peer)
            return
        incoming = self.leases.of(message.lease, peer)
        if incoming is None or incoming.key != key:
            self.leases.revoke(key, message.lease, peer, "the receiving worker knows no such lease")
        elif incoming.handoff is not None or message.again != incoming.retried:
            return  # an echo, perhaps while the writer is still putting corrupt blocks again
        elif len(message.checksums) != 8 * incoming.num_travelling or (
            message.spec.num_tokens != incoming.num_tokens
        ):
            self.leases.end(incoming, "the handoff does not match the grant")
        else:
            incoming.handoff, incoming.handoff_at, incoming.expires = message, now, now + self._times.lease
            incoming.add_checksums(incoming.num_cached, from_u64(message.checksums))
            self._check(incoming)
            self._conclude(incoming, now)

    def _check(self, incoming: Incoming) -> None:
        if (verify := incoming.checks()) is not None:
            self._actions.append(verify)

    def _conclude(self, incoming: Incoming, now: float) -> None:
        """Join the handoff, ask for its corrupt blocks again, or give it up, once the writer has put
        everything and no check is under way."""
        if incoming.verified and (incoming.is_test or incoming.is_prefix):
            self.leases.keep(incoming)
        elif incoming.verified:
            self.leases.join(incoming, now)
            self.num_joining += 1
        elif incoming.handoff is not None and incoming.wrong and not incoming.checking:
            if incoming.retried:
                self.leases.end(incoming, f"{len(incoming.wrong)} KV blocks arrived corrupt twice")
            else:
                positions = incoming.expect_again()
                self._actions.append(ExpectAgain(incoming.lease, positions))
                coordinator, dispatch = incoming.key
                nack = Nack(
                    coordinator=coordinator, dispatch=dispatch, lease=incoming.lease, positions=u32(positions)
                )
                self._actions.append(ToPeer(incoming.peer, nack))
