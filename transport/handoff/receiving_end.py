"""The receiving side's shell: the listener for prefill workers, movers that write their KV blocks, blocks to
be checked, and writers that end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ..channels.coordinator_link import opened_to, worker_of
from ..environment import Environment, LocalProcess
from ..messages.fields import has_ended, same_process
from ..messages.messages import BETWEEN_MOVERS, FROM_PREFILL, Meet, Message, Met, PeerId, Retire, Retired
from ..movers.targets import MoverTargets
from ..process.host import advertised_address
from .protocol import CloseLease, ExpectAgain, OpenLease, ToPeer, Verify
from .receiver import HandoffReceiver

RECEIVING = (OpenLease, ExpectAgain, CloseLease, Verify)
RECEIVE_LIMIT = 256
CHECK_BYTES = 8 << 20  # verified in one turn of the loop: about a millisecond
DEVICE_CHECK_BYTES = 1 << 30  # the same where the GPU sums them: it takes 0.2 ms for one block or for many
OnMessage = Callable[[Message, float], None]
_log = logging.getLogger(__name__)


class ReceivingCore(Protocol):
    """The core of a worker, as far as its peers go."""

    @property
    def receiver(self) -> HandoffReceiver: ...

    @property
    def worker(self) -> PeerId: ...

    def from_peer(self, peer: PeerId, message: Message, now: float) -> None: ...


class ReceivingEnd:
    """Carries out the actions of a ``HandoffReceiver``, and passes events to the core. ``blocks_a_turn`` are
    verified in one turn of the loop."""

    def __init__(
        self,
        environment: Environment,
        movers: MoverTargets,
        listen: str,
        host: str,
        check_bytes: int = CHECK_BYTES,
    ) -> None:
        """``listen``: for prefill workers, which find it at ``host``. ``check_bytes``: verified in one call
        of ``check`` by the CPU."""
        self._network, self._device = environment.network, environment.device
        self._movers, self._host = movers, host
        self.endpoints = movers.endpoints
        if self._device.sums_on_gpu:
            check_bytes = DEVICE_CHECK_BYTES
        self.blocks_a_turn = max(1, check_bytes // self._device.block_bytes)
        self._identities: dict[PeerId, bytes] = {}  # the channel to answer each writer on
        self._processes: dict[PeerId, LocalProcess | None] = {}  # writers on this host
        self._checks: deque[Verify] = deque()
        self._peers = self._network.listen(listen, FROM_PREFILL)

    @property
    def address(self) -> str:
        """The address that prefill workers connect to."""
        return advertised_address(self._peers.address, self._host)

    @property
    def has_checks(self) -> bool:
        """Whether blocks are waiting to be verified."""
        return bool(self._checks)

    def receive(self, ready: set[object], core: ReceivingCore, now: float, on_message: OnMessage) -> None:
        """Pass messages of prefill workers and arrived blocks to the core; ``on_message`` sees each message
        before."""
        if self._peers.socket in ready:
            self._receive_messages(core, now, on_message)
        for lease, position in self._movers.poll(ready, RECEIVE_LIMIT):
            core.receiver.arrived(lease, position)
        for peer, message in self._movers.take_messages():
            self._send(peer, message)

    def carry_out(self, action: ToPeer | OpenLease | ExpectAgain | CloseLease | Verify) -> None:
        """Carry out one action of the receiver. A message is one of ``FROM_DECODE``."""
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
        """Verify some of the arrived blocks: a few in each turn, so that a long prompt's blocks delay no
        other sequence's tokens. Blocks that the GPU sums are checked in one call."""
        room = self.blocks_a_turn
        while self._checks and room > 0:
            check = self._checks.popleft()
            if len(check.positions) > room:
                check, rest = check.split(room)
                self._checks.appendleft(rest)
            room -= len(check.positions)
            self._verify(check, core, now)

    def release_dead_writers(self, core: ReceivingCore, now: float) -> None:
        """Free the leases of writers on this host whose process has ended. Shut out those of other hosts that
        are silent, where their mover can."""
        for peer, process in list(self._processes.items()):
            ended = process is None or not process.alive()
            if ended and self._movers.ways_in.process_ended(peer, core.receiver):
                self._forget(peer)
        self._movers.ways_in.look(self._processes, core.receiver, now)

    def close(self) -> None:
        """End the listener and all movers."""
        self._movers.close_all()
        self._network.close(self._peers)

    def _receive_messages(self, core: ReceivingCore, now: float, on_message: OnMessage) -> None:
        for identity, message in self._peers.receive(RECEIVE_LIMIT):
            if (peer := worker_of(identity)) is None:
                continue
            known = self._identities.get(peer, b"")
            if _age(identity, core) >= _age(known, core):  # an older channel is not answered on
                self._identities[peer] = identity
            if not self._is_acceptable(peer, message, core):
                continue  # it will be sent again
            if isinstance(message, BETWEEN_MOVERS):
                self._movers.receive(peer, message)
            else:
                on_message(message, now)
                core.from_peer(peer, message, now)

    def _is_acceptable(self, peer: PeerId, message: Message, core: ReceivingCore) -> bool:
        """Return False where puts that were begun before may still land, or the writer's end would go
        unnoticed."""
        if isinstance(message, Retire):
            return self._movers.ways_in.may_retire(peer, message, core.receiver)
        if not isinstance(message, Meet):
            return True
        here = message.host == self._network.host
        if here:
            try:
                self._processes[peer] = self._network.process(message.pid)
            except OSError as error:
                _log.warning("cannot look at the process of %s: %s", peer[0], error.strerror)
                return False
        return self._movers.ways_in.may_meet(peer, message, here, core.receiver)

    def _send(self, peer: PeerId, message: Message) -> None:
        complete = self._movers.complete(message, peer) if isinstance(message, Met) else message
        if complete is not None and peer in self._identities:
            self._peers.send(self._identities[peer], complete)
        if isinstance(message, Retired) and has_ended(peer[1], message.incarnation):
            self._forget(peer)  # nothing more comes from it
            self._movers.ways_in.forget(peer)

    def _forget(self, peer: PeerId) -> None:
        self._processes.pop(peer, None)
        self._identities.pop(peer, None)

    def _verify(self, check: Verify, core: ReceivingCore, now: float) -> None:
        found = self._device.checksums(check.blocks)
        rows = zip(check.positions, found, check.checksums, strict=True)
        wrong = [position for position, checksum, sent in rows if checksum != sent]
        if wrong:
            _log.warning("%d of %d KV blocks arrived corrupt", len(wrong), len(check.blocks))
        core.receiver.verified(check.lease, check.positions, sorted(wrong), now)


def _age(identity: bytes, core: ReceivingCore) -> int:
    """Return the incarnation of this process that a peer's channel was opened to: a later one ranks higher; 0
    for another process."""
    incarnation = opened_to(identity)
    return incarnation if same_process(incarnation, core.worker[1]) else 0
