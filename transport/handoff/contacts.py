"""The decode workers that a sender of the handoff has met, or is meeting: when to say Meet, and by which
mover each is written. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..messages.messages import Met, Peer, PeerId
from ..movers.interface import FALLBACK_MOVER, MADE_ANEW


@dataclass(slots=True)
class Contact:
    """A decode worker that is being met, or has been."""

    peer: Peer
    met: Met | None = None
    said: float = -1e9  # when Meet was last said
    born: float = 0.0  # when it was first said
    renewed: float = -1e9
    rate: float | None = None  # of its mover, bytes a second


class Contacts:
    """By the name that each decode worker goes by now."""

    def __init__(self) -> None:
        self._contacts: dict[PeerId, Contact] = {}
        self._strangers: dict[PeerId, Contact] = {}  # those of them that have not answered yet
        self._failed_movers: dict[PeerId, tuple[str, ...]] = {}
        self._made_anew: set[PeerId] = (
            set()
        )  # whose mover has failed once since the last handoff to them that it carried

    def __getitem__(self, peer: PeerId) -> Contact:
        return self._contacts[peer]

    def get(self, peer: PeerId) -> Contact | None:
        """None: it is not known by this name."""
        return self._contacts.get(peer)

    def met(self, peer: PeerId) -> Met | None:
        """What was agreed on; None where it has not answered yet."""
        contact = self._contacts.get(peer)
        return contact.met if contact else None

    def rate(self, peer: PeerId) -> float | None:
        """Bytes a second of its mover; None: it has moved too little to tell."""
        contact = self._contacts.get(peer)
        return contact.rate if contact else None

    def add(self, peer: Peer) -> bool:
        """Whether it was not known: it is to be connected to, and greeted."""
        peer_id = (peer.worker_id, peer.incarnation)
        if peer_id in self._contacts:
            return False
        self._contacts[peer_id] = self._strangers[peer_id] = Contact(peer)
        return True

    def to_greet(self, every_s: float, now: float) -> Iterator[tuple[PeerId, Contact]]:
        """Whom to say Meet to now."""
        for peer, contact in list(self._strangers.items()):
            if now - contact.said >= every_s:
                contact.born = contact.born or now
                contact.said = now
                yield peer, contact

    def failed_movers(self, peer: PeerId) -> tuple[str, ...]:
        """Which it is not to choose again."""
        return self._failed_movers.get(peer, ())

    def waits_for(self, peer: PeerId, met: Met) -> bool:
        """Whether this is the answer to Meet, and no echo of a meeting before a mover failed."""
        return peer in self._strangers and met.mover not in self.failed_movers(peer)

    def agree(self, peer: PeerId, met: Met) -> Peer:
        """It is met, by this answer."""
        contact = self._strangers.pop(peer)
        contact.met = met
        return contact.peer

    def mover_has_carried(self, peer: PeerId) -> None:
        """A handoff has arrived there."""
        self._made_anew.discard(peer)

    def mover_failed(self, peer: PeerId) -> bool:
        """Whether from now on it is written by FALLBACK_MOVER: by one that is made anew once more, where that
        may help."""
        met = self.met(peer)
        if met is None or met.mover == FALLBACK_MOVER:
            return False
        if met.mover in MADE_ANEW and peer not in self._made_anew:
            self._made_anew.add(peer)
            return False
        self._failed_movers[peer] = (*self.failed_movers(peer), met.mover)
        return True

    def remove(self, peer: PeerId) -> None:
        """It is lost, or to be met anew."""
        self._contacts.pop(peer, None)
        self._strangers.pop(peer, None)

    def clear(self) -> None:
        """All are to be met anew."""
        self._contacts.clear()
        self._strangers.clear()

    def forget_failures(self) -> None:
        """What failed under an earlier name of ours may be tried again."""
        self._failed_movers.clear()
        self._made_anew.clear()
