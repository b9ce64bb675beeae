"""The receiving side's shell: the channel that prefill workers come in by, movers that their KV blocks arrive
by, blocks to be checked, and writers that end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ..channels.coordinator_link import opened_to, worker_of
from ..environment import Environment, LocalProcess
from ..messages.incarnation import has_ended, same_process
from ..messages.messages import BETWEEN_MOVERS, FROM_PREFILL, Meet, Message, Met, PeerId, Retire, Retired
from ..movers.targets import MoverTargets
from ..process.host import advertised_address
from .protocol import CloseLease, ExpectAgain, OpenLease, ToPeer, Verify
from .receiver import HandoffReceiver

RECEIVING = (OpenLease, ExpectAgain, CloseLease, Verify)
RECEIVE_LIMIT = 256
CHECK_BYTES = 8 << 20  # verified in one turn of the loop: about a millisecond
_log = logging.getLogger(__name__)


class ReceivingCore(Protocol):
    """The core of a decode worker, as far as its peers go."""

    @property
    def receiver(self) -> HandoffReceiver: ...

    @property
    def worker(self) -> PeerId: ...

    def from_peer(self, peer: PeerId, message: Message, now: float) -> None: ...


class ReceivingEnd:
    """Carries out the actions of a ``HandoffReceiver``, and tells the core what comes."""

    def __init__(
        self,
        environment: Environment,
        movers: MoverTargets,
        listen: str,
        host: str,
        check_bytes: int = CHECK_BYTES,
    ) -> None:
        """``listen``: for prefill workers, which find it at ``host``. ``check_bytes``: verified in one call
        of ``check``."""
        self._network, self._device, self._movers, self._host = (
            environment.network,
            environment.device,
            movers,
            host,
        )
        self.endpoints = movers.endpoints
        self._blocks_a_check = max(1, check_bytes // self._device.block_bytes)
        self._identities: dict[PeerId, bytes] = {}
        self._processes: dict[PeerId, LocalProcess | None] = {}
        self._checks: deque[Verify] = deque()
        self._peers = self._network.listen(listen, FROM_PREFILL)

    @property
    def address(self) -> str:
        """Where prefill workers find it."""
        return advertised_address(self._peers.address, self._host)

    @property
    def has_checks(self) -> bool:
        """Blocks have arrived that are to be verified."""
        return bool(self._checks)

    def receive(
        self, ready: set[object], core: ReceivingCore, now: float, heard: Callable[[Message, float], None]
    ) -> None:
        """Pass on to the core what prefill workers have sent and which blocks have arrived; messages to
        ``heard`` before."""
        if self._peers.socket in ready:
            self._receive_messages(core, now, heard)
        for lease, position in self._movers.poll(ready, RECEIVE_LIMIT):
            core.receiver.arrived(lease, position)
        for peer, message in self._movers.take_messages():
            self._send(peer, message)

    def carry_out(self, action: ToPeer | OpenLease | ExpectAgain | CloseLease | Verify) -> None:
        """One action of the receiver's; a message is one of ``FROM_DECODE``."""
        if isinstance(action, ToPeer):
            self._send(action.peer, action.message)
        elif isinstance(action, Verify):
            self._checks.append(action)
        elif isinstance(action, OpenLease):
            self._movers.open(action.lease, action.secret, action.targets)
        elif isinstance(action, ExpectAgain):
            self._movers.expect_again(action.lease, action.positions)
        else:
            self._movers.close(action.lease)
            self._checks = deque(check for check in self._checks if check.lease != action.lease)

    def check(self, core: ReceivingCore, now: float) -> None:
        """Verify some of what has arrived: a little in each turn, so that a long prompt's blocks hold up no
        other sequence's tokens."""
        room = self._blocks_a_check
        while self._checks and room > 0:
            check = self._checks.popleft()
            if len(check.positions) > room:
                check, rest = check.split(room)
                self._checks.appendleft(rest)
            room -= len(check.positions)
            self._verify(check, core, now)

    def release_dead_writers(self, core: ReceivingCore, now: float) -> None:
        """A prefill process of this host that has ended writes no more: what it had leased is free. One of
        another host that has gone silent is shut out first, where its mover can."""
        for peer, process in list(self._processes.items()):
            if (process is None or not process.alive()) and self._movers.ways_in.process_ended(
                peer, core.receiver
            ):
                del self._processes[peer]
                self._identities.pop(peer, None)
        self._movers.ways_in.look(self._processes, core.receiver, now)

    def close(self) -> None:
        """End the channel and all movers."""
        self._movers.close_all()
        self._network.close(self._peers)

    def _receive_messages(
        self, core: ReceivingCore, now: float, heard: Callable[[Message, float], None]
    ) -> None:
        for identity, message in self._peers.receive(RECEIVE_LIMIT):
            peer = worker_of(identity)
            if peer is not None:
                if _age(identity, core) >= _age(
                    self._identities.get(peer, b""), core
                ):  # an older channel is no way back
                    self._identities[peer] = identity
                if isinstance(message, Meet) and not self._note_writer(peer, message, core):
                    continue  # it will be said again
                if isinstance(message, Retire) and not self._movers.ways_in.may_retire(
                    peer, message, core.receiver
                ):
                    continue  # likewise
                if isinstance(message, BETWEEN_MOVERS):
                    self._movers.receive(peer, message)
                else:
                    heard(message, now)
                    core.from_peer(peer, message, now)

    def _note_writer(self, peer: PeerId, meet: Meet, core: ReceivingCore) -> bool:
        """Whether its end will be noticed, and what it began before can land no more: only then may it be
        given anything."""
        here = meet.host == self._network.host
        if here:
            try:
                self._processes[peer] = self._network.process(meet.pid)
            except OSError as error:
                _log.warning("cannot look at the process of %s: %s", peer[0], error.strerror)
                return False
        return self._movers.ways_in.may_meet(peer, meet, here, core.receiver)

    def _send(self, peer: PeerId, message: Message) -> None:
        complete = self._movers.complete(message, peer) if isinstance(message, Met) else message
        if complete is not None and peer in self._identities:
            self._peers.send(self._identities[peer], complete)
        if isinstance(message, Retired) and has_ended(
            peer[1], message.incarnation
        ):  # nothing more comes from it
            self._identities.pop(peer, None)
            self._processes.pop(peer, None)
            self._movers.ways_in.forget(peer)

    def _verify(self, check: Verify, core: ReceivingCore, now: float) -> None:
        mover = core.receiver.mover_of(check.lease)
        found = self._device.checksums(mover, check.blocks)
        rows = zip(check.positions, found, check.checksums, strict=True)
        wrong = {position for position, checksum, sent in rows if checksum != sent}
        if wrong:
            _log.warning("%d of %d KV blocks arrived corrupt", len(wrong), len(check.blocks))
        right = [
            block
            for position, block in zip(check.positions, check.blocks, strict=True)
            if position not in wrong
        ]
        self._device.store(mover, right)
        core.receiver.verified(check.lease, check.positions, sorted(wrong), now)


def _age(identity: bytes, core: ReceivingCore) -> int:
    """Ranks a peer's channels by the incarnation of this process that each was opened to: later is more; 0
    for another process."""
    incarnation = opened_to(identity)
    return incarnation if same_process(incarnation, core.worker[1]) else 0
