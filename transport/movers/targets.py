"""All the ways in which a decode worker takes KV blocks in, as one: leases are opened and closed on every one
of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from ..handoff.handoff import FALLBACK_MOVER, FORMER_NAME, PeerId
from ..handoff.receiver import MoverEndpoints
from ..handoff.ways_in import WaysIn
from ..messages.messages import Message, Met
from .interface import Arrival, PutTarget, as_talking_target

_log = logging.getLogger(__name__)


class MoverTargets:
    """``targets``: by mover; ``endpoints``: what the receiving core tells peers of them; ``tell``: see
    ``WaysIn``."""

    def __init__(
        self,
        targets: Mapping[str, PutTarget],
        endpoints: MoverEndpoints,
        tell: Callable[[str], None] = _log.warning,
    ) -> None:
        self._targets, self.endpoints = targets, endpoints
        self.ways_in = WaysIn(targets, tell)

    @property
    def fds(self) -> list[int]:
        """To be polled for reading."""
        return [target.fd for target in self._targets.values() if target.fd is not None]

    def complete(self, met: Met, peer: PeerId) -> Met | None:
        """``met`` with what this peer's mover needs. None: not ready, the peer will ask again."""
        if met.refused or not met.mover:
            return met
        mover = FALLBACK_MOVER if met.mover == FORMER_NAME else met.mover
        address = self._targets[mover].address(peer)
        if address is None:
            return None
        self.ways_in.met(peer, mover)
        return replace(met, mover_address=address)

    def open(self, lease: int, secret: bytes, positions: Mapping[int, int]) -> None:
        for target in self._targets.values():
            target.open(lease, secret, positions)

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        for target in self._targets.values():
            target.expect_again(lease, positions)

    def close(self, lease: int) -> None:
        for target in self._targets.values():
            target.close(lease)

    def hear(self, peer: PeerId, message: Message) -> None:
        """One of BETWEEN_MOVERS."""
        for target in self._targets.values():
            if (talking := as_talking_target(target)) is not None:
                talking.hear(peer, message)

    def words(self) -> list[tuple[PeerId, Message]]:
        """What movers have to say to their other ends."""
        talking = [as_talking_target(target) for target in self._targets.values()]
        return [word for target in talking if target is not None for word in target.words()]

    def poll(self, ready: AbstractSet[object], limit: int) -> list[Arrival]:
        """What has arrived by movers whose descriptor is among ``ready``, up to ``limit`` blocks each."""
        return [
            arrival
            for target in self._targets.values()
            if target.fd in ready
            for arrival in target.poll(limit)
        ]

    def close_all(self) -> None:
        for target in self._targets.values():
            target.close_all()
