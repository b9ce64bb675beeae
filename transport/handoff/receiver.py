"""The decode worker's side of the KV handoff (the protocol is drawn in protocol.py).

It declines a handoff for these reasons only:

    answer   reason                                                  decided in
    -------  ------------------------------------------------------  ---------------------------
    Met      the models differ; no mover in common                   ``Writers.meet``
    Refuse   the prompt can never fit (final); its hashes do not     ``Granting.obstacle``
             match its length
    Refuse   a newer epoch of the request is known                   ``_admit``
    Revoke   the lease is unknown, expired, or cancelled             ``_on_handoff``, ``tick``, ``cancel``
    Revoke   the handoff does not match its grant                    ``_on_handoff``
    Revoke   blocks arrived corrupt twice                            ``_settle``
    Revoke   its writer did not answer and was shut out              ``writer_shut_out``

No room is no reason: the offer waits, and the grant comes later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from ..messages.messages import (
    Ack,
    Handoff,
    Meet,
    Message,
    Met,
    ModelIdentity,
    Nack,
    Offer,
    PeerId,
    Placed,
    Refuse,
    Release,
    Renew,
    Retire,
    Retired,
    Revoke,
    from_u64,
    u32,
)
from ..movers.interface import MoverEndpoints as MoverEndpoints
from .granting import BlockPool, Granting
from .incoming import Incoming
from .leases import LeaseTable
from .protocol import (
    CloseLease,
    ExpectAgain,
    HandoffTimes,
    Join,
    Key,
    OpenLease,
    ReceiverAction,
    Supersede,
    ToPeer,
    Wait,
    remember,
)
from .writers import Writers


class HandoffReceiver:
    """The decode worker's side of all its handoffs.

    ``room`` answers (sequence slots free, blocks to leave for running sequences); ``secret`` draws a grant's
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
        self._worker, self._pool = worker, pool
        self._times = times or HandoffTimes()
        self._writers = Writers(identity, endpoints, pool.num_blocks)
        self._granting = Granting(pool, identity, room, secret, self._times.lease)
        self._leases = LeaseTable(pool)
        self._past: OrderedDict[Key, int] = OrderedDict()  # joined: key -> lease
        self._actions: list[ReceiverAction] = []
        self.num_joining = 0
        """Handoffs that are complete and whose Join nobody has taken yet: each has its row already."""
        self.num_corrupt_blocks = 0

    def rename(self, worker: PeerId) -> None:
        """Takes a new incarnation: everything under the old one ends, nothing of it is answered to any
        more."""
        self.cancel_all()
        self._worker = worker
        self._writers.forget_choices()

    @property
    def num_waiting(self) -> int:
        return len(self._granting.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(i.num_tokens for i in self._granting.waiting.values())

    @property
    def num_granted(self) -> int:
        return len(self._leases.granted)

    @property
    def num_leased_blocks(self) -> int:
        """Blocks under a lease or in quarantine (they count as used in the pool)."""
        return self._leases.num_blocks

    def blocks_open_to(self, lease: int) -> list[int]:
        """The blocks that this lease's writer may still be writing."""
        return self._leases.blocks_open_to(lease)

    def leases(self) -> dict[int, float]:
        """When each lease ends, by lease, unless it is renewed. (One whose blocks are being checked ends with
        the check.)"""
        return self._leases.ends()

    def writers(self) -> dict[PeerId, int]:
        """The process ids of the prefill workers met: the shell reports the end of one on this host by
        ``writer_gone``."""
        return dict(self._writers.pids)

    def keys(self) -> list[Key]:
        return [*self._granting.waiting, *self._leases.granted]

    def waits(self) -> Iterator[Wait]:
        """Every handoff here that time ends. (A lease in quarantine waits for its writer's word or death, one
        that is being verified for this worker's own check.)"""
        for offer in self._granting.waiting.values():
            yield Wait(offer.key, "room, while its offer is repeated", offer.heard + self._times.waiting)
        for incoming in self._leases.granted.values():
            if not incoming.verifying:
                yield Wait(incoming.key, "blocks, under a lease", incoming.expires)

    def block_tables(self) -> Iterator[list[int]]:
        """The blocks that are referenced here: under a lease, or in quarantine."""
        return self._leases.block_tables()

    @property
    def has_actions(self) -> bool:
        """Whether there is anything to ``take``."""
        return bool(self._actions)

    def take(self) -> list[ReceiverAction]:
        """What is to be done since the last call, in order."""
        actions, self._actions, self.num_joining = self._actions, [], 0
        return actions

    def receive(self, peer: PeerId, message: Message, now: float) -> None:
        """A message from a prefill worker."""
        if isinstance(message, Meet):
            if not self._writers.has_retired(peer):  # else an echo
                self._actions.append(ToPeer(peer, self._meet(peer, message)))
        elif isinstance(message, Offer):
            self._on_offer(peer, message, now)
        elif isinstance(message, Renew):
            for lease in from_u64(message.leases):
                self._on_renew(peer, lease, now)
        elif isinstance(message, Placed):
            self._on_placed(peer, message)
        elif isinstance(message, Handoff):
            self._on_handoff(peer, message, now)
        elif isinstance(message, Release):
            self._on_release(peer, message)
        elif isinstance(message, Retire):
            for ended in self._writers.retire(peer, message):
                self.writer_gone(ended)
            self._actions.append(ToPeer(peer, Retired(incarnation=message.incarnation)))

    def arrived(self, lease: int, position: int) -> None:
        """A two-sided mover has written this block."""
        incoming = self._leases.by_lease.get(lease)
        if incoming is not None:
            incoming.arrive((position,))
            self._check(incoming)

    def mover_of(self, lease: int) -> str:
        """The mover that this lease's writer uses; empty where there is no such lease."""
        incoming = self._leases.by_lease.get(lease)
        return incoming.mover if incoming is not None else ""

    def verified(self, lease: int, positions: list[int], wrong: list[int], now: float) -> None:
        """The answer to a Verify action, or to a part of it: ``wrong`` are those of ``positions`` that
        differ."""
        incoming = self._leases.by_lease.get(lease)
        if incoming is not None:
            incoming.checked(positions, wrong)
            self.num_corrupt_blocks += len(wrong)
            self._settle(incoming, now)

    def cancel(self, key: Key) -> None:
        """The coordinator has dropped this dispatch."""
        self._granting.waiting.pop(key, None)
        if key in self._leases.granted:
            self._end(self._leases.granted[key], "the request was cancelled")

    def cancel_all(self, keep: Callable[[Key], bool] = lambda key: False) -> None:
        """Drops every handoff but those that ``keep`` names."""
        for key in self.keys():
            if not keep(key):
                self.cancel(key)

    def writer_gone(self, peer: PeerId) -> None:
        """This prefill worker's process has ended, or is not called so any more: nothing of it can be
        written."""
        for incoming in [
            i for i in (*self._granting.waiting.values(), *self._leases.granted.values()) if i.peer == peer
        ]:
            self.cancel(incoming.key)
        self._leases.free_of_writer(peer)
        self._writers.forget(peer)

    def silent_writers(self, now: float) -> set[PeerId]:
        """Those that have not answered for long when asked to let go: the shell may shut them out, and say so
        by ``writer_shut_out``."""
        return self._leases.quarantine.silent_writers(self._times.silence, now)

    def writer_shut_out(self, peer: PeerId) -> None:
        """This peer, dead or not, writes nothing by itself any more that it has begun: those leases end, what
        they held is free."""
        for incoming in [i for i in self._leases.of_writer(peer) if i.one_sided]:
            self._end(incoming, "the decode worker has shut its writer out, which did not answer")
        self._leases.free_of_writer(peer)

    def tick(self, now: float) -> None:
        """Ends expired leases, forgets silent offers, grants what now has room."""
        self._granting.forget_silent(self._times.waiting, now)
        for incoming in [i for i in self._leases.granted.values() if now >= i.expires and not i.verifying]:
            self._end(incoming, "the lease ran out: no renewal from the prefill worker")
        for lease, ended in self._leases.quarantine.to_ask(self._times.resend, now):
            self._revoke(ended.key, lease, ended.writer, "the lease has ended")
        self.grant_waiting(now)

    def grant_waiting(self, now: float) -> None:
        """Grants offers in order of arrival, until one has no room."""
        while (incoming := self._granting.grant_next(self._worker[1], now)) is not None:
            assert incoming.grant is not None, "it was just made"
            incoming.mover = self._writers.movers.get(incoming.peer, "")
            self._leases.grant(incoming)
            targets = dict(enumerate(incoming.blocks[incoming.num_cached :], start=incoming.num_cached))
            self._actions.append(OpenLease(incoming.lease, incoming.grant.secret, targets))
            self._actions.append(ToPeer(incoming.peer, incoming.grant))

    def _meet(self, peer: PeerId, meet: Meet) -> Met:
        for earlier in self._writers.earlier_runs(peer):
            self.writer_gone(earlier)
        return self._writers.meet(peer, meet, self._worker)

    def _on_offer(self, peer: PeerId, offer: Offer, now: float) -> None:
        key = (offer.coordinator, offer.dispatch)
        if peer not in self._writers:
            return  # we have not met; the sender is told to begin anew by our silence and its deadline
        known = self._leases.granted.get(key)
        if known is not None and known.grant is not None:
            self._actions.append(ToPeer(peer, known.grant))
        elif key in self._granting.waiting:
            self._granting.waiting[key].heard = now
        elif key not in self._past:
            self._admit(peer, offer, now)

    def _admit(self, peer: PeerId, offer: Offer, now: float) -> None:
        if not self._granting.is_newest(offer):
            self._refuse(peer, offer, "a newer epoch is known here", False)
        elif (obstacle := self._granting.obstacle(offer, self._worker[0])) is not None:
            self._refuse(peer, offer, *obstacle)
        else:
            self._supersede(offer)
            self._granting.join(peer, offer, now)
            self.grant_waiting(now)

    def _refuse(self, peer: PeerId, offer: Offer, reason: str, final: bool) -> None:
        refuse = Refuse(coordinator=offer.coordinator, dispatch=offer.dispatch, reason=reason, final=final)
        self._actions.append(ToPeer(peer, refuse))

    def _supersede(self, offer: Offer) -> None:
        same = [
            i
            for i in (*self._granting.waiting.values(), *self._leases.granted.values())
            if i.request_id == offer.request_id
        ]
        for incoming in same:
            self.cancel(incoming.key)
            self._actions.append(Supersede(incoming.key))

    def _on_renew(self, peer: PeerId, lease: int, now: float) -> None:
        if (incoming := self._leases.of(lease, peer)) is not None:
            incoming.expires = now + self._times.lease

    def _on_handoff(self, peer: PeerId, message: Handoff, now: float) -> None:
        key = (message.spec.coordinator, message.spec.dispatch)
        if self._past.get(key) == message.lease:
            self._actions.append(ToPeer(peer, Ack(coordinator=key[0], dispatch=key[1], lease=message.lease)))
            return
        incoming = self._leases.of(message.lease, peer)
        if incoming is None or incoming.key != key:
            self._revoke(key, message.lease, peer, "the decode worker knows no such lease")
            return
        if incoming.handoff is not None or message.again != incoming.retried:
            # known; or an echo of the first one, while the writer is still putting the wrong blocks again
            return
        if (
            len(message.checksums) != 8 * incoming.num_travelling
            or message.spec.num_tokens != incoming.num_tokens
        ):
            self._end(incoming, "the handoff does not match the grant")
            return
        incoming.handoff, incoming.handoff_at, incoming.expires = message, now, now + self._times.lease
        self._hear_checksums(incoming, incoming.num_cached, message.checksums)
        self._settle(incoming, now)

    def _on_placed(self, peer: PeerId, message: Placed) -> None:
        incoming = self._leases.of(message.lease, peer)
        if incoming is not None and incoming.handoff is None and not incoming.retried:
            self._hear_checksums(incoming, message.first, message.checksums)

    def _hear_checksums(self, incoming: Incoming, first: int, column: bytes) -> None:
        checksums = from_u64(column)
        if incoming.told(first, checksums):
            if incoming.one_sided:
                incoming.arrive(range(first, first + len(checksums)))
            self._check(incoming)

    def _check(self, incoming: Incoming) -> None:
        if (verify := incoming.checks()) is not None:
            self._actions.append(verify)

    def _settle(self, incoming: Incoming, now: float) -> None:
        """Once the writer has put everything and no check is under way: joined, asked for again, or given
        up."""
        if incoming.verified:
            self._join(incoming, now)
        elif incoming.handoff is not None and incoming.wrong and not incoming.checking:
            if incoming.retried:
                self._end(incoming, f"{len(incoming.wrong)} KV blocks arrived corrupt twice")
            else:
                self._ask_again(incoming)

    def _ask_again(self, incoming: Incoming) -> None:
        positions = incoming.expect_again()
        self._actions.append(ExpectAgain(incoming.lease, positions))
        coordinator, dispatch = incoming.key
        nack = Nack(
            coordinator=coordinator, dispatch=dispatch, lease=incoming.lease, positions=u32(positions)
        )
        self._actions.append(ToPeer(incoming.peer, nack))

    def _join(self, incoming: Incoming, now: float) -> None:
        handoff = incoming.handoff
        assert handoff is not None
        self._leases.take_back(incoming)
        remember(self._past, incoming.key, incoming.lease)
        self.num_joining += 1
        hashes, behind = incoming.hashes, incoming.num_behind
        self._pool.commit_all(
            incoming.blocks[behind : len(hashes)], hashes[behind:], hashes[behind - 1] if behind else None
        )
        self._actions.append(CloseLease(incoming.lease))
        self._actions.append(
            ToPeer(
                incoming.peer,
                Ack(coordinator=incoming.key[0], dispatch=incoming.key[1], lease=incoming.lease),
            )
        )
        self._actions.append(
            Join(
                incoming.key,
                handoff.spec,
                incoming.blocks,
                handoff.token,
                handoff.logprobs,
                incoming.num_cached - behind,
                handoff.num_cached_tokens,
                handoff.since_s + now - incoming.handoff_at,
                hashes[-1] if hashes else None,
            )
        )

    def _end(self, incoming: Incoming, reason: str) -> None:
        """The lease ends without a join: the writer must stop, and with a one-sided mover be believed to have
        stopped."""
        self._leases.end(incoming, incoming.one_sided)
        self._actions.append(CloseLease(incoming.lease))
        self._revoke(incoming.key, incoming.lease, incoming.peer, reason)

    def _revoke(self, key: Key, lease: int, writer: PeerId, reason: str) -> None:
        self._actions.append(
            ToPeer(writer, Revoke(coordinator=key[0], dispatch=key[1], lease=lease, reason=reason))
        )

    def _on_release(self, peer: PeerId, message: Release) -> None:
        waiting = self._granting.waiting.get((message.coordinator, message.dispatch))
        if waiting is not None and waiting.peer == peer:
            del self._granting.waiting[waiting.key]
        incoming = self._leases.of(message.lease, peer)
        if incoming is not None:
            self._leases.end(incoming, one_sided=False)  # its writer has stopped
            self._actions.append(CloseLease(incoming.lease))
        elif message.lease in self._leases.quarantine.of_writer(peer):
            self._leases.free(message.lease)
