"""The receiving side's shell: the channel that prefill workers come in by, movers that their KV blocks arrive by, blocks to be checked, and
writers that end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import zmq

from ..decode.core import DecodeCore
from ..engine.worker_model import WorkerModel
from ..transport.channels.channels import RouterChannel
from ..transport.channels.coordinator_link import opened_to, worker_of
from ..transport.channels.host import EVERYWHERE, advertised_address, host_identity, host_towards
from ..transport.channels.incarnation import has_ended, same_process
from ..transport.channels.keys import ClusterKey
from ..transport.channels.liveness import ProcessIdentity
from ..transport.errors import AddressError
from ..transport.handoff.actions import CloseLease, ExpectAgain, OpenLease, ToPeer, Verify
from ..transport.handoff.handoff import PeerId
from ..transport.messages.messages import BETWEEN_MOVERS, FROM_PREFILL, Meet, Message, Met, Retire, Retired
from ..transport.movers.checksum import checksums
from ..transport.movers.opening import ON_DEVICE, MoverTargets, offered
from ..transport.movers.shm import SharedPool
from .settings import DecodeSettings

RECEIVING = (OpenLease, ExpectAgain, CloseLease, Verify)
RECEIVE_LIMIT = 256
CHECK_BYTES = 8 << 20  # verified in one turn of the loop: about a millisecond
_log = logging.getLogger(__name__)


class ReceivingEnd:
    """Carries out what a ``HandoffReceiver`` wants done, and tells the core what comes."""

    def __init__(self, settings: DecodeSettings, model: WorkerModel, key: ClusterKey | None, shared: SharedPool | None) -> None:
        """``shared``: the pool's memory, where other processes of this host may map it."""
        self._settings, self._model = settings, model
        self._block_bytes = model.pool[0].nbytes
        self._identities: dict[PeerId, bytes] = {}
        self._processes: dict[PeerId, ProcessIdentity | None] = {}
        self._checks: deque[Verify] = deque()
        self._peers = RouterChannel.bind(settings.listen, key, FROM_PREFILL)
        plaintext, host = settings.plaintext_kv or settings.insecure, advertised_host(settings)
        self._host = host
        movers = offered(settings.mover, plaintext, model.device.type == "cuda")
        self._movers = MoverTargets(movers, model.pool, shared, settings.data_listen, host, plaintext, model.device_blocks)
        self.endpoints = self._movers.endpoints

    @property
    def address(self) -> str:
        """Where prefill workers find it."""
        return advertised_address(self._peers.address, self._host)

    @property
    def has_checks(self) -> bool:
        """Blocks have arrived that are to be verified."""
        return bool(self._checks)

    def watch_by(self, poller: zmq.Poller) -> None:
        """Registers what ``receive`` reads from."""
        poller.register(self._peers.socket, zmq.POLLIN)
        for fd in self._movers.fds:
            poller.register(fd, zmq.POLLIN)

    def receive(self, ready: set[object], core: DecodeCore, now: float, heard: Callable[[Message, float], None]) -> None:
        """What prefill workers said, and which blocks have arrived, goes to the core; messages to ``heard`` before."""
        if self._peers.socket in ready:
            self._hear_peers(core, now, heard)
        for lease, position in self._movers.poll(ready, RECEIVE_LIMIT):
            core.receiver.arrived(lease, position)
        for peer, word in self._movers.words():
            self._tell(peer, word)

    def carry_out(self, action: ToPeer | OpenLease | ExpectAgain | CloseLease | Verify) -> None:
        """One action of the receiver's; a message is one of ``FROM_DECODE``."""
        if isinstance(action, ToPeer):
            self._tell(action.peer, action.message)
        elif isinstance(action, Verify):
            self._checks.append(action)
        elif isinstance(action, OpenLease):
            self._movers.open(action.lease, action.secret, action.targets)
        elif isinstance(action, ExpectAgain):
            self._movers.expect_again(action.lease, action.positions)
        else:
            self._movers.close(action.lease)
            self._checks = deque(check for check in self._checks if check.lease != action.lease)

    def check(self, core: DecodeCore, now: float) -> None:
        """Verifies some of what has arrived: a little in each turn, so that a long prompt's blocks hold up nobody's tokens."""
        room = max(1, CHECK_BYTES // self._block_bytes)
        while self._checks and room > 0:
            check = self._checks.popleft()
            if len(check.positions) > room:
                check, rest = check.split(room)
                self._checks.appendleft(rest)
            room -= len(check.positions)
            self._verify(check, core, now)

    def bury_dead_writers(self, core: DecodeCore, now: float) -> None:
        """A prefill process of this host that has ended writes no more: what it had leased is free. One of another host that has gone
        silent is shut out first, where its mover can."""
        for peer, process in list(self._processes.items()):
            if (process is None or not process.alive()) and self._movers.ways_in.process_ended(peer, core.receiver):
                del self._processes[peer]
                self._identities.pop(peer, None)
        self._movers.ways_in.look(self._processes, core.receiver, now)

    def close(self) -> None:
        """Ends the channel and all movers."""
        self._movers.close_all()
        self._peers.close()

    def _hear_peers(self, core: DecodeCore, now: float, heard: Callable[[Message, float], None]) -> None:
        for identity, message in self._peers.receive(RECEIVE_LIMIT):
            peer = worker_of(identity)
            if peer is not None:
                if _age(identity, core) >= _age(self._identities.get(peer, b""), core):  # what an older channel still brings is no way back
                    self._identities[peer] = identity
                if isinstance(message, Meet) and not self._note_writer(peer, message, core):
                    continue  # it will be said again
                if isinstance(message, Retire) and not self._movers.ways_in.may_retire(peer, message, core.receiver):
                    continue  # likewise
                if isinstance(message, BETWEEN_MOVERS):
                    self._movers.hear(peer, message)
                else:
                    heard(message, now)
                    core.from_peer(peer, message, now)

    def _note_writer(self, peer: PeerId, meet: Meet, core: DecodeCore) -> bool:
        """Whether its end will be noticed, and what it began before can land no more: only then may it be given anything."""
        here = meet.host == host_identity()
        if here:
            try:
                self._processes[peer] = ProcessIdentity.of(meet.pid)
            except OSError as error:
                _log.warning("cannot look at the process of %s: %s", peer[0], error.strerror)
                return False
        return self._movers.ways_in.may_meet(peer, meet, here, core.receiver)

    def _tell(self, peer: PeerId, message: Message) -> None:
        said = self._movers.complete(message, peer) if isinstance(message, Met) else message
        if said is not None and peer in self._identities:
            self._peers.send(self._identities[peer], said)
        if isinstance(message, Retired) and has_ended(peer[1], message.incarnation):  # nothing more comes from it
            self._identities.pop(peer, None)
            self._processes.pop(peer, None)
            self._movers.ways_in.forget(peer)

    def _verify(self, check: Verify, core: DecodeCore, now: float) -> None:
        on_device = self._model.device_blocks if core.receiver.mover_of(check.lease) in ON_DEVICE else None
        found = checksums(self._model.pool, check.blocks) if on_device is None else on_device.checksums(check.blocks)
        rows = zip(check.positions, found, check.checksums, strict=True)
        wrong = {position for position, checksum, said in rows if checksum != said}
        if wrong:
            _log.warning("%d of %d KV blocks arrived corrupt", len(wrong), len(check.blocks))
        if on_device is None:
            self._model.store([block for position, block in zip(check.positions, check.blocks, strict=True) if position not in wrong])
        core.receiver.verified(check.lease, check.positions, sorted(wrong), now)


def _age(identity: bytes, core: DecodeCore) -> int:
    """Ranks a peer's channels by which incarnation of this process each was opened to: later is more, none of this process's is 0."""
    incarnation = opened_to(identity)
    return incarnation if same_process(incarnation, core.worker[1]) else 0


def advertised_host(settings: DecodeSettings) -> str:
    """The host that prefill workers connect to: where the worker listens on all addresses, the one that coordinators see it by. Raises
    AddressError where that cannot be found."""
    listened = settings.listen.removeprefix("tcp://").rpartition(":")[0]
    if settings.advertise_host or listened not in EVERYWHERE:
        return settings.advertise_host or listened.strip("[]")
    coordinator = settings.coordinators[0]
    try:
        host = host_towards(coordinator)
    except OSError as error:
        raise AddressError(
            f"--listen {settings.listen} names no address that prefill workers can connect to, and this host's own cannot be told from "
            f"the coordinator's, {coordinator} ({error}): give --advertise-host"
        ) from error
    _log.info("listening on all addresses (%s): prefill workers are told %s; --advertise-host names another", settings.listen, host)
    return host
