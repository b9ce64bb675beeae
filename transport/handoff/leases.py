"""The decode worker's leases, each from its grant until its blocks are free or joined, and writers. Pure.

granted -- join -------------------> joined       the blocks are the sequence's
granted -- keep -------------------> cached       a prefix, for prompts that begin with it
granted -- release ----------------> closing      the writer has stopped
granted -- end, two-sided mover ---> closing      expired, cancelled, or corrupt twice
granted -- end, one-sided mover ---> quarantine   its writer may still write
closing -- free_closed ------------> free         CloseLease is carried out: no parcel on its way is put there
quarantine -- free ----------------> closing      the writer has stopped, is dead, or is shut out
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from ..messages.fields import COUNT_BITS, has_ended
from ..messages.messages import Ack, Meet, Met, ModelIdentity, PeerId, Revoke
from ..movers.interface import FALLBACK_MOVER, SAME_HOST_MOVERS, TWO_GPU_MOVERS, MoverEndpoints
from .granting import BlockPool, Incoming
from .protocol import CloseLease, Join, Key, OpenLease, PrefixOver, ReceiverAction, ToPeer, remember


@dataclass(slots=True)
class EndedLease:
    """A lease that ended without its writer's Release."""

    key: Key
    writer: PeerId
    blocks: list[int]
    asked: float = -1e9  # when the writer was last asked to release
    since: float = 0.0  # when it was first asked


class Quarantine:
    """Leases that ended without their writer's Release. Time alone ends nothing here: the writer's Release
    does, or its death, or that it was shut out."""

    def __init__(self) -> None:
        self.leases: dict[int, EndedLease] = {}

    @property
    def num_blocks(self) -> int:
        return sum(len(ended.blocks) for ended in self.leases.values())

    def of_writer(self, peer: PeerId) -> list[int]:
        """Return the leases that wait for this writer."""
        return [lease for lease, ended in self.leases.items() if ended.writer == peer]

    def due(self, every_s: float, now: float) -> Iterator[tuple[int, EndedLease]]:
        """Yield the leases whose writers are to be asked now."""
        for lease, ended in self.leases.items():
            if now - ended.asked >= every_s:
                ended.since = ended.since or now
                ended.asked = now
                yield lease, ended

    def silent_writers(self, silence_s: float, now: float) -> set[PeerId]:
        """Return the writers that have not answered for ``silence_s``."""
        return {e.writer for e in self.leases.values() if e.since and now - e.since >= silence_s}


class LeaseTable:
    """The blocks of ``pool`` that a writer may be writing. Adds to ``actions``."""

    def __init__(self, pool: BlockPool, actions: list[ReceiverAction]) -> None:
        self._pool, self._actions = pool, actions
        self.granted: dict[Key, Incoming] = {}
        self.by_lease: dict[int, Incoming] = {}
        self.joined: OrderedDict[Key, int] = OrderedDict()  # the lease of each, for late echoes
        self.quarantine = Quarantine()
        self._closing: list[list[int]] = []  # the blocks of each
        self.num_prefix_blocks = 0  # that have come

    @property
    def num_blocks(self) -> int:
        """Blocks under a lease or in quarantine (they count as used in the pool)."""
        return sum(map(len, self.block_tables()))

    def block_tables(self) -> Iterator[list[int]]:
        """Yield the blocks that are referenced here, lease by lease."""
        yield from (incoming.held for incoming in self.granted.values())
        yield from (ended.blocks for ended in self.quarantine.leases.values())
        yield from self._closing

    def of(self, lease: int, peer: PeerId) -> Incoming | None:
        """Return the lease, if it is this writer's."""
        incoming = self.by_lease.get(lease)
        return incoming if incoming is not None and incoming.peer == peer else None

    def grant(self, incoming: Incoming) -> None:
        """Begin the lease: open it to its writer and send the grant."""
        assert incoming.grant is not None, "a grant has been made"
        self.granted[incoming.key] = self.by_lease[incoming.lease] = incoming
        targets = dict(enumerate(incoming.blocks[incoming.num_cached :], start=incoming.num_cached))
        self._actions.append(OpenLease(incoming.lease, incoming.grant.secret, targets))
        self._actions.append(ToPeer(incoming.peer, incoming.grant))

    def join(self, incoming: Incoming, now: float) -> None:
        """End the lease with its handoff complete: the blocks are cached, and belong to the sequence."""
        handoff = incoming.handoff
        assert handoff is not None
        self._close(incoming)
        remember(self.joined, incoming.key, incoming.lease)
        hashes, behind = incoming.hashes, incoming.num_behind
        parent = hashes[behind - 1] if behind else None
        self._pool.commit_all(incoming.blocks[behind : len(hashes)], hashes[behind:], parent)
        self.acknowledge(incoming.key, incoming.lease, incoming.peer)
        self._actions.append(
            Join(
                incoming.key,
                handoff,
                incoming.blocks,
                incoming.spare,
                incoming.num_cached - behind,
                handoff.since_s + now - incoming.handoff_at,
                hashes[-1] if hashes else None,
            )
        )

    def keep(self, incoming: Incoming) -> None:
        """End the lease of a prefix or a self-test that has been verified. The blocks of a prefix are cached
        now; that of a test is free."""
        self._close(incoming, came=True)
        remember(self.joined, incoming.key, incoming.lease)
        self.num_prefix_blocks += incoming.num_travelling if incoming.is_prefix else 0
        self._pool.commit_all(incoming.blocks[: len(incoming.hashes)], incoming.hashes, None)
        self._pool.release(incoming.held)
        self.acknowledge(incoming.key, incoming.lease, incoming.peer)

    def end(self, incoming: Incoming, reason: str) -> None:
        """End the lease without a join. The blocks of a one-sided writer are free only once it has
        stopped."""
        self._close(incoming)
        if incoming.one_sided:
            self.quarantine.leases[incoming.lease] = EndedLease(incoming.key, incoming.peer, incoming.held)
        else:
            self._closing.append(incoming.held)
        self.revoke(incoming.key, incoming.lease, incoming.peer, reason)

    def release(self, lease: int, peer: PeerId) -> None:
        """Free the lease's blocks: its writer has stopped."""
        if (incoming := self.of(lease, peer)) is not None:
            self._close(incoming)
            self._closing.append(incoming.held)
        elif lease in self.quarantine.of_writer(peer):
            self.free(lease)

    def free_closed(self) -> None:
        """Free the blocks of ended leases. The caller carries out the actions so far, each CloseLease among
        them, before it makes a step."""
        for blocks in self._closing:
            self._pool.release(blocks)
        self._closing.clear()

    def free(self, lease: int) -> None:
        """Free the blocks of a lease in quarantine: its writer has stopped."""
        self._closing.append(self.quarantine.leases.pop(lease).blocks)

    def free_of_writer(self, peer: PeerId) -> None:
        """Free the blocks in quarantine of a writer that writes no more."""
        for lease in self.quarantine.of_writer(peer):
            self.free(lease)

    def end_expired(self, now: float) -> None:
        for incoming in [i for i in self.granted.values() if now >= i.expires and not i.verifying]:
            self.end(incoming, "the lease expired: no renewal from the prefill worker")

    def ask_writers(self, every_s: float, now: float) -> None:
        """Ask the writers of leases in quarantine again to release them."""
        for lease, ended in self.quarantine.due(every_s, now):
            self.revoke(ended.key, lease, ended.writer, "the lease has ended")

    def acknowledge(self, key: Key, lease: int, writer: PeerId) -> None:
        self._actions.append(ToPeer(writer, Ack(coordinator=key[0], dispatch=key[1], lease=lease)))

    def revoke(self, key: Key, lease: int, writer: PeerId, reason: str) -> None:
        message = Revoke(coordinator=key[0], dispatch=key[1], lease=lease, reason=reason)
        self._actions.append(ToPeer(writer, message))

    def _close(self, incoming: Incoming, came: bool = False) -> None:
        self.granted.pop(incoming.key, None)
        self.by_lease.pop(incoming.lease, None)
        self._actions.append(CloseLease(incoming.lease))
        if incoming.is_prefix:
            self._actions.append(PrefixOver(incoming.key, came))


class Writers:
    """Agrees with each prefill worker on a mover. ``num_blocks``: of this worker's pool."""

    def __init__(self, identity: ModelIdentity, endpoints: MoverEndpoints, num_blocks: int) -> None:
        self._identity, self._endpoints, self._num_blocks = identity, endpoints, num_blocks
        self.movers: dict[PeerId, str] = {}  # the one in use, by writer
        self.pids: dict[PeerId, int] = {}
        # newest incarnation, by worker id and process
        self._retired: OrderedDict[PeerId, int] = OrderedDict()
        self._num_failed: dict[PeerId, int] = {}  # movers that a writer has named as failed; only grows

    def meet(self, peer: PeerId, meet: Meet, worker: PeerId) -> Met:
        """Return the answer to Meet. ``worker``: this decode worker's present name. The answer to an echo
        contains that name and nothing else, so that it cannot be taken for the answer to the newest Meet."""
        worker_id, incarnation = worker
        self.pids[peer] = meet.pid
        if self._is_echo(peer, meet, incarnation):
            return Met(worker_id=worker_id, incarnation=incarnation)
        ours = self._endpoints
        same_host = meet.host == ours.host
        able = [m for m in meet.movers if m in ours.movers and (same_host or m not in SAME_HOST_MOVERS)]
        if meet.gpu and meet.gpu == ours.gpu:  # NCCL connects no two processes on one GPU
            able = [mover for mover in able if mover not in TWO_GPU_MOVERS]
        common = [m for m in able if m not in meet.failed] or [FALLBACK_MOVER] * bool(meet.failed)
        refused = _difference(self._identity, meet.model)
        if refused or not common:
            refused = refused or self._nothing_common(meet, same_host)
            return Met(worker_id=worker_id, incarnation=incarnation, refused=refused)
        self._num_failed[peer] = len(meet.failed)
        self.movers[peer] = common[0]
        return Met(
            worker_id=worker_id,
            incarnation=incarnation,
            mover=common[0],
            num_blocks=self._num_blocks,
            data_address=ours.data_address,
            shm_name=ours.shm_name,
        )

    def retire(self, peer: PeerId, ended: int) -> list[PeerId]:
        """Return the names that are over with this incarnation: no put that was begun under them is under
        way. Echoes of their messages do not bring them back."""
        process = (peer[0], ended >> COUNT_BITS)
        remember(self._retired, process, max(ended, self._retired.get(process, 0)))
        return [known for known in self.pids if known[0] == peer[0] and has_ended(known[1], ended)]

    def has_retired(self, peer: PeerId) -> bool:
        return peer[1] <= self._retired.get((peer[0], peer[1] >> COUNT_BITS), 0)

    def forget_choices(self) -> None:
        """Allow movers again that failed with this worker's earlier incarnation."""
        self._num_failed.clear()

    def forget(self, peer: PeerId) -> None:
        """Forget this writer: its process or its name has ended."""
        self.movers.pop(peer, None)
        self._num_failed.pop(peer, None)
        self.pids.pop(peer, None)

    def _is_echo(self, peer: PeerId, meet: Meet, incarnation: int) -> bool:
        """Whether Meet was sent to an earlier incarnation of ours, or before a mover failed."""
        return meet.addressee not in (0, incarnation) or len(meet.failed) < self._num_failed.get(peer, 0)

    def _nothing_common(self, meet: Meet, same_host: bool) -> str:
        needs = "" if same_host else f" ({' and '.join(sorted(SAME_HOST_MOVERS))}: on the same host only)"
        if meet.gpu and meet.gpu == self._endpoints.gpu:
            needs += f" ({' and '.join(sorted(TWO_GPU_MOVERS))}: between two GPUs only; these share one)"
        ours = ", ".join(self._endpoints.movers)
        return f"no mover in common: prefill has {', '.join(meet.movers)}; decode has {ours}{needs}"


def _difference(ours: ModelIdentity, theirs: ModelIdentity) -> str:
    """Return a sentence that names the first field that differs; empty if KV blocks fit."""
    if (found := ours.difference(theirs)) is None:
        return ""
    name, a, b = found
    return f"the workers' {name} differs: decode has {a}, prefill has {b}"
