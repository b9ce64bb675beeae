"""The decode worker's side of the KV handoff (the protocol is drawn in handoff.py)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from .actions import CloseLease, ExpectAgain, Join, OpenLease, ReceiverAction, Supersede, ToPeer
from .handoff import ONE_SIDED_MOVERS, SAME_HOST_MOVERS, HandoffTimes, Key, PeerId, Wait
from .incoming import Incoming
from .messages import (
    Ack,
    Grant,
    Handoff,
    Meet,
    Message,
    Met,
    ModelIdentity,
    Nack,
    Offer,
    Placed,
    Refuse,
    Release,
    Renew,
    Revoke,
    from_hashes,
    from_u64,
    u32,
)

MEMORY_OF_PAST = 8192
_K = TypeVar("_K")
_V = TypeVar("_V")


class BlockPool(Protocol):
    """What the receiver needs of a block manager."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_available(self) -> int: ...
    def match_prefix(self, hashes: Sequence[bytes]) -> int: ...
    def num_idle_among(self, hashes: Sequence[bytes]) -> int: ...
    def acquire_prefix(self, hashes: Sequence[bytes]) -> list[int]: ...
    def allocate(self, count: int) -> list[int] | None: ...
    def commit(self, block: int, block_hash: bytes, parent: bytes | None) -> None: ...
    def release(self, blocks: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class MoverEndpoints:
    """What this decode worker can be written through, best first, and where."""

    movers: tuple[str, ...]
    host: str
    shm_name: str = ""
    data_address: str = ""


@dataclass(slots=True)
class Ended:
    """Blocks of a lease that ended without its writer's word."""

    key: Key
    writer: PeerId
    blocks: list[int]
    asked: float = -1e9  # when the writer was last asked to let go
    since: float = 0.0  # when it was first asked


class HandoffReceiver:
    """The decode worker's side of all its handoffs.

    ``room`` answers (sequence slots free, blocks to leave for running sequences); ``secret`` draws a grant's secret.
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
        self._worker, self._identity, self._pool = worker, identity, pool
        self._endpoints, self._room, self._secret = endpoints, room, secret
        self._times = times or HandoffTimes()
        self._one_sided: dict[PeerId, bool] = {}
        self._num_movers: dict[PeerId, int] = {}  # that a peer has named: they only become fewer
        self._pids: dict[PeerId, int] = {}
        self._waiting: OrderedDict[Key, Incoming] = OrderedDict()
        self._granted: dict[Key, Incoming] = {}
        self._by_lease: dict[int, Incoming] = {}
        self._quarantine: dict[int, Ended] = {}
        self._past: OrderedDict[Key, int] = OrderedDict()  # joined: key -> lease
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._next_lease = 1
        self._actions: list[ReceiverAction] = []
        self.num_corrupt_blocks = 0

    def rename(self, worker: PeerId) -> None:
        """Takes a new incarnation: everything under the old one ends, nothing of it is answered to any more."""
        self.cancel_all()
        self._worker = worker
        self._num_movers.clear()  # what failed with the old one may be tried again

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(i.num_tokens for i in self._waiting.values())

    @property
    def num_granted(self) -> int:
        return len(self._granted)

    @property
    def num_leased_blocks(self) -> int:
        """Blocks under a lease or in quarantine (they count as used in the pool)."""
        return sum(len(i.blocks) for i in self._granted.values()) + sum(len(e.blocks) for e in self._quarantine.values())

    def blocks_open_to(self, lease: int) -> list[int]:
        """The blocks that this lease's writer may still be writing."""
        incoming = self._by_lease.get(lease)
        if incoming is not None:
            return incoming.blocks[incoming.num_cached :]
        return self._quarantine[lease].blocks if lease in self._quarantine else []

    def leases(self) -> dict[int, float]:
        """When each lease ends, by lease, unless it is renewed. (One whose blocks are being checked ends with the check.)"""
        return {i.lease: i.expires for i in self._granted.values() if not i.verifying}

    def writers(self) -> dict[PeerId, int]:
        """The process ids of the prefill workers met: the shell reports the end of one on this host by ``writer_gone``."""
        return dict(self._pids)

    def keys(self) -> list[Key]:
        return [*self._waiting, *self._granted]

    def waits(self) -> Iterator[Wait]:
        """Every handoff here. (A lease in quarantine waits for its writer's word or death: time alone cannot end it.)"""
        for offer in self._waiting.values():
            yield Wait(offer.key, "room, while its offer is repeated", offer.heard + self._times.waiting)
        for incoming in self._granted.values():
            if not incoming.verifying:
                yield Wait(incoming.key, "blocks, under a lease", incoming.expires)

    def block_tables(self) -> Iterator[list[int]]:
        """The blocks that are referenced here: under a lease, or in quarantine."""
        yield from (incoming.blocks for incoming in self._granted.values())
        yield from (ended.blocks for ended in self._quarantine.values())

    def take(self) -> list[ReceiverAction]:
        """What is to be done since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def receive(self, peer: PeerId, message: Message, now: float) -> None:
        """A message from a prefill worker."""
        if isinstance(message, Meet):
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

    def arrived(self, lease: int, position: int) -> None:
        """A two-sided mover has written this block."""
        incoming = self._by_lease.get(lease)
        if incoming is not None:
            incoming.arrived.add(position)
            self._check(incoming)

    def verified(self, lease: int, positions: list[int], wrong: list[int], now: float) -> None:
        """The answer to a Verify action, or to a part of it: ``wrong`` are those of ``positions`` that differ."""
        incoming = self._by_lease.get(lease)
        if incoming is not None:
            incoming.checked(positions, wrong)
            self.num_corrupt_blocks += len(wrong)
            self._settle(incoming, now)

    def cancel(self, key: Key) -> None:
        """The coordinator has dropped this dispatch."""
        self._waiting.pop(key, None)
        if key in self._granted:
            self._end(self._granted[key], "the request was cancelled")

    def cancel_all(self, keep: Callable[[Key], bool] = lambda key: False) -> None:
        """Drops every handoff but those that ``keep`` names."""
        for key in self.keys():
            if not keep(key):
                self.cancel(key)

    def writer_gone(self, peer: PeerId) -> None:
        """This prefill worker's process has ended: nothing of it can be written any more."""
        for incoming in [i for i in (*self._waiting.values(), *self._granted.values()) if i.peer == peer]:
            self.cancel(incoming.key)
        for lease in [lease for lease, ended in self._quarantine.items() if ended.writer == peer]:
            self._free_quarantine(lease)
        self._one_sided.pop(peer, None)
        self._num_movers.pop(peer, None)
        self._pids.pop(peer, None)

    def silent_writers(self, now: float) -> set[PeerId]:
        """Those that have not answered for long when asked to let go: the shell may shut them out, and say so by ``writer_shut_out``."""
        return {e.writer for e in self._quarantine.values() if e.since and now - e.since >= self._times.silence}

    def writer_shut_out(self, peer: PeerId) -> None:
        """This peer, dead or not, can write nothing any more by the mover that it was met with: its leases end, what they held is free."""
        for incoming in [i for i in self._granted.values() if i.peer == peer]:
            self._end(incoming, "the decode worker has shut its writer out, which did not answer")
        for lease in [lease for lease, ended in self._quarantine.items() if ended.writer == peer]:
            self._free_quarantine(lease)

    def tick(self, now: float) -> None:
        """Ends expired leases, forgets silent offers, grants what now has room."""
        for incoming in [i for i in self._waiting.values() if now - i.heard > self._times.waiting]:
            del self._waiting[incoming.key]
        for incoming in [i for i in self._granted.values() if now >= i.expires and not i.verifying]:
            self._end(incoming, "the lease ran out: no renewal from the prefill worker")
        for lease, ended in self._quarantine.items():
            if now - ended.asked >= self._times.resend:
                ended.since = ended.since or now
                ended.asked = now
                self._revoke(ended.key, lease, ended.writer, "the lease has ended")
        self.grant_waiting(now)

    def grant_waiting(self, now: float) -> None:
        """Grants offers in order of arrival, until one has no room."""
        while self._waiting:
            incoming = next(iter(self._waiting.values()))
            if not self._grant(incoming, now):
                return
            del self._waiting[incoming.key]

    def _meet(self, peer: PeerId, meet: Meet) -> Met:
        worker_id, incarnation = self._worker
        for earlier in [e for e, pid in self._pids.items() if e[0] == peer[0] and e[1] < peer[1] and pid == meet.pid]:
            self.writer_gone(earlier)  # the same process under a new incarnation: it has no put of the old one under way
        self._pids[peer] = meet.pid
        refused = _difference(self._identity, meet.model)
        ours = self._endpoints
        same_host = meet.host == ours.host
        common = [m for m in meet.movers if m in ours.movers and (same_host or m not in SAME_HOST_MOVERS)]
        if not refused and not common:
            refused = f"no mover in common: prefill has {', '.join(meet.movers)}; decode has {', '.join(ours.movers)}" + (
                "" if same_host else f" ({' and '.join(sorted(SAME_HOST_MOVERS))}: on the same host only)"
            )
        if refused:
            return Met(worker_id=worker_id, incarnation=incarnation, refused=refused)
        if not self._is_echo(peer, meet):
            self._num_movers[peer] = len(meet.movers)
            self._one_sided[peer] = common[0] in ONE_SIDED_MOVERS
        return Met(
            worker_id=worker_id,
            incarnation=incarnation,
            mover=common[0],
            num_blocks=self._pool.num_blocks,
            data_address=ours.data_address,
            shm_name=ours.shm_name,
        )

    def _is_echo(self, peer: PeerId, meet: Meet) -> bool:
        """Said to an earlier incarnation of ours, or before a mover failed: the mover in use is another."""
        return meet.addressee not in (0, self._worker[1]) or len(meet.movers) > self._num_movers.get(peer, len(meet.movers))

    def _on_offer(self, peer: PeerId, offer: Offer, now: float) -> None:
        key = (offer.coordinator, offer.dispatch)
        if peer not in self._one_sided:
            return  # we have not met; the sender is told to begin anew by our silence and its deadline
        known = self._granted.get(key)
        if known is not None and known.grant is not None:
            self._actions.append(ToPeer(peer, known.grant))
        elif key in self._waiting:
            self._waiting[key].heard = now
        elif key not in self._past and self._is_newest(offer, peer):
            self._admit(peer, key, offer, now)

    def _is_newest(self, offer: Offer, peer: PeerId) -> bool:
        latest = self._epochs.get(offer.request_id, -1)
        if offer.epoch < latest:
            self._actions.append(ToPeer(peer, _refuse(offer.coordinator, offer.dispatch, "a newer epoch is known here", False)))
        return offer.epoch >= latest

    def _admit(self, peer: PeerId, key: Key, offer: Offer, now: float) -> None:
        needed = -(-offer.num_tokens // self._identity.block_size)
        if needed >= self._pool.num_blocks:
            reason = f"the prompt needs {needed} KV blocks and room to grow; {self._worker[0]} has {self._pool.num_blocks} in all"
            self._actions.append(ToPeer(peer, _refuse(offer.coordinator, offer.dispatch, reason, True)))
            return
        hashes = from_hashes(offer.block_hashes)
        if len(hashes) != offer.num_tokens // self._identity.block_size:
            self._actions.append(ToPeer(peer, _refuse(offer.coordinator, offer.dispatch, "hashes do not match the token count", False)))
            return
        self._supersede(offer)
        _remember(self._epochs, offer.request_id, offer.epoch)
        self._waiting[key] = Incoming(key, peer, offer.request_id, offer.epoch, offer.num_tokens, hashes, now)
        self.grant_waiting(now)

    def _supersede(self, offer: Offer) -> None:
        same = [i for i in (*self._waiting.values(), *self._granted.values()) if i.request_id == offer.request_id]
        for incoming in same:
            self.cancel(incoming.key)
            self._actions.append(Supersede(incoming.key))

    def _grant(self, incoming: Incoming, now: float) -> bool:
        slots, headroom = self._room()
        total = -(-incoming.num_tokens // self._identity.block_size)
        hits = self._pool.match_prefix(incoming.hashes)
        idle = self._pool.num_idle_among(incoming.hashes[:hits])
        if slots < 1 or total - hits + headroom > self._pool.num_available - idle:
            return False
        cached = self._pool.acquire_prefix(incoming.hashes)
        fresh = self._pool.allocate(total - len(cached))
        assert fresh is not None, "room was checked"
        incoming.blocks, incoming.num_cached = cached + fresh, len(cached)
        incoming.lease, self._next_lease = self._lease_id(), self._next_lease + 1
        incoming.expires = now + self._times.lease
        coordinator, dispatch = incoming.key
        incoming.grant = Grant(
            coordinator=coordinator,
            dispatch=dispatch,
            lease=incoming.lease,
            secret=self._secret(),
            blocks=u32(incoming.blocks),
            num_cached_blocks=len(cached),
            lease_s=self._times.lease,
        )
        self._granted[incoming.key] = self._by_lease[incoming.lease] = incoming
        targets = dict(enumerate(incoming.blocks[len(cached) :], start=len(cached)))
        self._actions.append(OpenLease(incoming.lease, incoming.grant.secret, targets))
        self._actions.append(ToPeer(incoming.peer, incoming.grant))
        return True

    def _lease_id(self) -> int:
        return (self._worker[1] & 0x3FFFFFFF) << 32 | self._next_lease

    def _on_renew(self, peer: PeerId, lease: int, now: float) -> None:
        incoming = self._by_lease.get(lease)
        if incoming is not None and incoming.peer == peer:
            incoming.expires = now + self._times.lease

    def _on_handoff(self, peer: PeerId, message: Handoff, now: float) -> None:
        key = (message.spec.coordinator, message.spec.dispatch)
        if self._past.get(key) == message.lease:
            self._actions.append(ToPeer(peer, Ack(coordinator=key[0], dispatch=key[1], lease=message.lease)))
            return
        incoming = self._by_lease.get(message.lease)
        if incoming is None or incoming.key != key or incoming.peer != peer:
            self._revoke(key, message.lease, peer, "the decode worker knows no such lease")
            return
        if incoming.handoff is not None:
            return
        if len(message.checksums) != 8 * incoming.num_travelling or message.spec.num_tokens != incoming.num_tokens:
            self._end(incoming, "the handoff does not match the grant")
            return
        incoming.handoff, incoming.handoff_at, incoming.expires = message, now, now + self._times.lease
        self._hear_checksums(incoming, incoming.num_cached, message.checksums)
        self._settle(incoming, now)

    def _on_placed(self, peer: PeerId, message: Placed) -> None:
        incoming = self._by_lease.get(message.lease)
        if incoming is not None and incoming.peer == peer and incoming.handoff is None and not incoming.retried:
            self._hear_checksums(incoming, message.first, message.checksums)

    def _hear_checksums(self, incoming: Incoming, first: int, column: bytes) -> None:
        checksums = from_u64(column)
        if incoming.told(first, checksums):
            if self._one_sided.get(incoming.peer, False):
                incoming.arrived.update(range(first, first + len(checksums)))
            self._check(incoming)

    def _check(self, incoming: Incoming) -> None:
        if (verify := incoming.checks()) is not None:
            self._actions.append(verify)

    def _settle(self, incoming: Incoming, now: float) -> None:
        """Once the writer has put everything and no check is under way: joined, asked for again, or given up."""
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
        nack = Nack(coordinator=coordinator, dispatch=dispatch, lease=incoming.lease, positions=u32(positions))
        self._actions.append(ToPeer(incoming.peer, nack))

    def _join(self, incoming: Incoming, now: float) -> None:
        handoff = incoming.handoff
        assert handoff is not None
        self._forget(incoming)
        _remember(self._past, incoming.key, incoming.lease)
        parent: bytes | None = None
        for block, block_hash in zip(incoming.blocks, incoming.hashes, strict=False):
            self._pool.commit(block, block_hash, parent)
            parent = block_hash
        self._actions.append(CloseLease(incoming.lease))
        self._actions.append(ToPeer(incoming.peer, Ack(coordinator=incoming.key[0], dispatch=incoming.key[1], lease=incoming.lease)))
        self._actions.append(
            Join(
                incoming.key,
                handoff.spec,
                incoming.blocks,
                handoff.token,
                handoff.logprobs,
                incoming.num_cached,
                now - incoming.handoff_at,
            )
        )

    def _end(self, incoming: Incoming, reason: str) -> None:
        """The lease ends without a join: the writer must stop, and with a one-sided mover be believed to have stopped."""
        self._forget(incoming)
        self._actions.append(CloseLease(incoming.lease))
        if self._one_sided.get(incoming.peer, False):
            self._quarantine[incoming.lease] = Ended(incoming.key, incoming.peer, incoming.blocks)
        else:
            self._pool.release(incoming.blocks)
        self._revoke(incoming.key, incoming.lease, incoming.peer, reason)

    def _revoke(self, key: Key, lease: int, writer: PeerId, reason: str) -> None:
        self._actions.append(ToPeer(writer, Revoke(coordinator=key[0], dispatch=key[1], lease=lease, reason=reason)))

    def _forget(self, incoming: Incoming) -> None:
        self._granted.pop(incoming.key, None)
        self._by_lease.pop(incoming.lease, None)

    def _on_release(self, peer: PeerId, message: Release) -> None:
        waiting = self._waiting.get((message.coordinator, message.dispatch))
        if waiting is not None and waiting.peer == peer:
            del self._waiting[waiting.key]
        incoming = self._by_lease.get(message.lease)
        if incoming is not None and incoming.peer == peer:
            self._forget(incoming)
            self._actions.append(CloseLease(incoming.lease))
            self._pool.release(incoming.blocks)
        elif message.lease in self._quarantine and self._quarantine[message.lease].writer == peer:
            self._free_quarantine(message.lease)

    def _free_quarantine(self, lease: int) -> None:
        self._pool.release(self._quarantine.pop(lease).blocks)


def _remember(past: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    past[key] = value
    past.move_to_end(key)
    if len(past) > MEMORY_OF_PAST:
        past.popitem(last=False)


def _refuse(coordinator: int, dispatch: int, reason: str, final: bool) -> Refuse:
    return Refuse(coordinator=coordinator, dispatch=dispatch, reason=reason, final=final)


def _difference(ours: ModelIdentity, theirs: ModelIdentity) -> str:
    """A sentence naming the first field that differs; empty where none does."""
    for name in ModelIdentity.model_fields:
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            return f"the workers' {name.replace('_', ' ')} differs: decode has {a!r}, prefill has {b!r}"
    return ""
