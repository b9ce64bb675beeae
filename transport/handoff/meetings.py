"""The decode workers that a sender of the handoff has met, or is meeting, and the mover that it writes each
of them by. Pure.

    unknown -- meet --------------> MEETING    Connect, then Meet, repeated
    MEETING -- Met ---------------> TESTING    OpenMover
    TESTING -- tested ------------> MET        prompts are offered
    TESTING -- test_failed -------> MEETING    for the next mover
    any     -- remove ------------> unknown    lost, or its mover failed; the next prompt meets it anew
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from ..messages.fields import same_process
from ..messages.messages import Meet, Met, OtherVersion, Peer, PeerId, Release, Retire
from ..movers.interface import FALLBACK_MOVER, MADE_ANEW, ONE_SIDED_MOVERS
from .layer_slicing import seen
from .protocol import Connect, Key, OpenMover, SenderAction, ToPeer


@dataclass(slots=True)
class Holder:
    """A decode worker that may hold blocks for an incarnation of ours."""

    peer: Peer
    incarnation: int  # the newest of ours that it may hold blocks for
    sent_at: float = -1e9  # when Retire was last sent


class Retirement:
    """The decode workers that may hold blocks for an earlier name of this worker.

    A decode worker keeps the blocks of a one-sided writer until the writer releases them. A writer that goes
    on under its name is asked, and answers. A name that ends without its process (another role, another
    incarnation) cannot be asked: a lost Release, or a Grant that never came, would keep those blocks for
    good. So the process sends Retire with the ended incarnation, and repeats it until Retired.

    ``ended``: our newest incarnation that is over; those before it are over too.
    """

    def __init__(self) -> None:
        self.ended = 0
        self._holders: dict[PeerId, Holder] = {}

    def add(self, peer: Peer, incarnation: int) -> None:
        """Note that ``peer`` may grant blocks to this incarnation of ours, which writes them by itself."""
        self._holders[peer.worker_id, peer.incarnation] = Holder(peer, incarnation)

    def connected(self, peer: Peer) -> None:
        """Note that there is a channel to this decode worker. Under a new name it may still hold the blocks
        that it granted under its old one."""
        known = [h.incarnation for (worker_id, _), h in self._holders.items() if worker_id == peer.worker_id]
        if known:
            self._holders.setdefault((peer.worker_id, peer.incarnation), Holder(peer, max(known)))

    @property
    def is_complete(self) -> bool:
        """Whether no decode worker may hold blocks for a name of ours that has ended."""
        return not self.pending()

    def pending(self) -> list[Peer]:
        """Return the decode workers that have not answered Retire."""
        return [holder.peer for holder in self._holders.values() if holder.incarnation <= self.ended]

    def due(self, every_s: float, now: float) -> Iterator[PeerId]:
        """Yield the decode workers that Retire is to be sent to now."""
        for peer, holder in self._holders.items() if self.ended else ():
            if holder.incarnation <= self.ended and now - holder.sent_at >= every_s:
                holder.sent_at = now
                yield peer

    def answered(self, worker_id: str, incarnation: int) -> None:
        """Note that this decode worker, under any name, holds nothing for ours up to ``incarnation``."""
        for peer in [
            p for p, h in self._holders.items() if p[0] == worker_id and h.incarnation <= incarnation
        ]:
            del self._holders[peer]

    def restarted(self, peer: PeerId) -> None:
        """Forget this decode worker's process: another one answers at its address."""
        for known in [k for k in self._holders if k[0] == peer[0] and same_process(k[1], peer[1])]:
            del self._holders[known]

    def forget(self, worker_id: str) -> None:
        """Forget this decode worker: it is gone for good."""
        for peer in [peer for peer in self._holders if peer[0] == worker_id]:
            del self._holders[peer]


@dataclass(slots=True)
class Contact:
    """A decode worker that is being met, or has been. ``met``: its answer, once there is one; ``is_tested``:
    its mover may carry prompts."""

    peer: Peer
    met: Met | None = None
    is_tested: bool = False
    left_out: str = ""  # the mover that failed its self-test last, and why
    since: float = 0.0  # when Meet was first sent
    greeted_at: float = -1e9  # when Meet was last sent
    renewed_at: float = -1e9  # when its leases were last renewed
    rate: float | None = None  # of its mover in bytes/s, once it has moved enough to measure


class Meetings:
    """Contacts by the name that each decode worker has now. Adds to ``actions``."""

    def __init__(self, meet: Meet, actions: list[SenderAction]) -> None:
        self._meet, self._actions = meet, actions
        self.retirement = Retirement()
        self._contacts: dict[PeerId, Contact] = {}
        self._unanswered: dict[PeerId, Contact] = {}
        self._failed_movers: dict[PeerId, tuple[str, ...]] = {}  # not to be chosen again
        self._made_anew: set[PeerId] = set()  # its mover has failed once since the last handoff it carried

    def rename(self, meet: Meet) -> None:
        """Go on under a new incarnation; call ``retire`` before. A mover that failed under the earlier name
        may be tried again."""
        self._meet = meet
        self._failed_movers.clear()
        self._made_anew.clear()
        self._actions += [Connect(peer) for peer in self.retirement.pending()]

    def retire(self) -> None:
        """End the present name: all decode workers are to be met anew."""
        self._contacts.clear()
        self._unanswered.clear()
        self.retirement.ended = self._meet.incarnation

    def meet(self, peer: Peer) -> Contact:
        """Return the contact; a new one is connected to."""
        peer_id = (peer.worker_id, peer.incarnation)
        if (contact := self._contacts.get(peer_id)) is None:
            contact = self._contacts[peer_id] = self._unanswered[peer_id] = Contact(peer)
            self.retirement.connected(peer)
            self._actions.append(Connect(peer))
        return contact

    def decline(self, peer: Peer, key: Key) -> None:
        """Inform a prefill worker, met or not, that no prefix comes for this dispatch."""
        self.meet(peer)
        release = Release(lease=0, coordinator=key[0], dispatch=key[1])
        self._actions.append(ToPeer((peer.worker_id, peer.incarnation), release))

    def greet(self, every_s: float, now: float) -> list[tuple[PeerId, float]]:
        """Send Meet again where it was not answered. Return each of these peers, and for how many seconds it
        has not answered."""
        greeted = []
        for peer, contact in self._unanswered.items():
            if now - contact.greeted_at >= every_s:
                contact.since, contact.greeted_at = contact.since or now, now
                self._actions.append(ToPeer(peer, self._meet_for(peer)))
                greeted.append((peer, now - contact.since))
        return greeted

    def receive(self, peer: PeerId, met: Met | OtherVersion) -> Contact | str | None:
        """Take an answer to Meet. Return the contact if it is met now, the reason if the peer is lost, None
        for an echo of an earlier meeting."""
        if isinstance(met, OtherVersion):
            return f"worker {peer[0]}: {met.sentence}" if peer in self._unanswered else None
        if peer not in self._unanswered or met.mover in self._failed_movers.get(peer, ()):
            return None
        if met.refused:
            return f"worker {peer[0]} refused: {met.refused}"
        if (met.worker_id, met.incarnation) != peer:
            return f"worker {peer[0]} has restarted"
        if not met.mover:  # it answers an echo of a Meet to an earlier incarnation; ours is still on its way
            return None
        contact = self._unanswered.pop(peer)
        contact.met = met
        if met.mover in ONE_SIDED_MOVERS:
            self.retirement.add(contact.peer, self._meet.incarnation)
        self._actions.append(OpenMover(peer, met, contact.left_out))
        return contact

    def is_testing(self, peer: PeerId) -> bool:
        """Return whether the peer's mover is open and not tested yet."""
        contact = self._contacts.get(peer)
        return contact is not None and contact.met is not None and not contact.is_tested

    def test_failed(self, peer: PeerId, reason: str) -> str:
        """Meet the peer again for the next mover. Return a sentence where there is none to be used: another
        takes the place of a mover that is forced only once that one has worked."""
        contact = self._contacts[peer]
        assert contact.met is not None, "its mover was tested"
        mover = contact.met.mover
        sentence = f"the mover {mover} to {peer[0]} failed its self-test ({reason})"
        if len(self._meet.movers) == 1 and peer not in self._made_anew:
            return f"{sentence}; no other is used, for --mover allows only this one: auto allows all"
        if mover == FALLBACK_MOVER:
            return f"{sentence}; there is no other"
        self._failed_movers[peer] = (*self._failed_movers.get(peer, ()), mover)
        contact.met, contact.left_out, contact.since, contact.greeted_at = None, sentence, 0.0, -1e9
        self._unanswered[peer] = contact
        return ""

    def send_retire(self, every_s: float, now: float) -> None:
        """Send Retire again where it was not answered."""
        for peer in self.retirement.due(every_s, now):
            self._actions.append(ToPeer(peer, Retire(incarnation=self.retirement.ended)))

    def note_transfer(self, peer: PeerId, num_bytes: int, seconds: float) -> None:
        """Note a timed transfer: how finely later blocks are cut depends on the mover's rate."""
        if (contact := self._contacts.get(peer)) is not None:
            contact.rate = seen(contact.rate, num_bytes, seconds)

    def delivered(self, peer: PeerId) -> None:
        """Note that the peer's mover has carried a handoff."""
        self._made_anew.discard(peer)

    def mover_failed(self, peer: PeerId) -> bool:
        """Choose the mover of the next meeting: the same once more where that may help, else FALLBACK_MOVER.
        Return whether it is the fallback now and was not before."""
        contact = self._contacts.get(peer)
        if contact is None or contact.met is None or contact.met.mover == FALLBACK_MOVER:
            return False
        if contact.met.mover in MADE_ANEW and peer not in self._made_anew:
            self._made_anew.add(peer)
            return False
        self._failed_movers[peer] = (*self._failed_movers.get(peer, ()), contact.met.mover)
        return True

    def remove(self, peer: PeerId) -> None:
        """Forget the contact: the peer is lost, or to be met anew."""
        self._contacts.pop(peer, None)
        self._unanswered.pop(peer, None)

    def _meet_for(self, peer: PeerId) -> Meet:
        """Return Meet for this peer. It names FALLBACK_MOVER too once another mover has failed."""
        failed, movers = self._failed_movers.get(peer, ()), self._meet.movers
        if failed and FALLBACK_MOVER not in movers:
            movers = (*movers, FALLBACK_MOVER)
        return replace(self._meet, movers=movers, failed=failed, addressee=peer[1])
