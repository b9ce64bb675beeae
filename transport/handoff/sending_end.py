"""The sending side's shell: channels to the decode workers met, movers into their pools, checksums of what leaves.

A prefill worker has one for all its handoffs; a decode worker has one for the sequences that it hands to others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from ..channels.channels import DealerChannel
from ..channels.coordinator_link import identity_of
from ..channels.incarnation import is_earlier, same_process
from ..channels.keys import ClusterKey
from ..errors import PeerEnded, TransportError
from ..messages.messages import BETWEEN_MOVERS, FROM_DECODE, Message, Met, Placed, Release, u64
from ..movers.block_memory import DevicePool
from ..movers.checksum import DeviceChecksums, RunningChecksums
from ..movers.interface import Pool, PutSource, as_talking_source
from ..movers.opening import ON_DEVICE, open_source
from .actions import CancelPuts, Connect, OpenMover, Put, SenderAction, SendHandoff, SendPlaced, ToPeer
from .handoff import FALLBACK_MOVER, PeerId
from .sender import HandoffSender
from .transfer_clock import TransferClock

RECEIVE_LIMIT = 256
LOOK_S, IDLE_LOOK_S = 0.05, 1.0
BEYOND_REACH_S = 1.0  # ZeroMQ connects again within a tenth where it can
FIRST_CONTACT_S = 5.0  # the first connection, whose handshake waits for both ends' threads
FORGOTTEN_S = 300.0  # connected to anew when a prompt is for it again
FENCED = "the decode worker has been fenced, and goes on as a new incarnation"
RESTARTED = "the decode worker has been started anew"
_log = logging.getLogger(__name__)


class SourceBlocks(Protocol):
    """The KV blocks that are sent from."""

    @property
    def pool(self) -> Pool:
        """Host memory, uint8 [num_blocks, num_layers, layer_bytes]."""

    @property
    def num_layers(self) -> int: ...

    @property
    def device_blocks(self) -> DevicePool | None:
        """The cache itself, where it lies on a GPU."""

    def fetch(self, blocks: Sequence[int], first_layer: int = 0, num_layers: int | None = None) -> None:
        """Brings these layers of these blocks into ``pool``."""


class SendingEnd:
    """Carries out what a ``HandoffSender`` wants done. Channels are opened under ``incarnation`` and registered with ``poller``."""

    def __init__(
        self,
        sender: HandoffSender,
        worker_id: str,
        incarnation: int,
        key: ClusterKey | None,
        source: SourceBlocks,
        poller: zmq.Poller,
        plaintext: bool,
    ) -> None:
        """``plaintext``: whether KV blocks may leave unencrypted."""
        self._sender, self._worker_id, self._incarnation = sender, worker_id, incarnation
        self._key, self._source, self._poller, self._plaintext = key, source, poller, plaintext
        self._channels: dict[PeerId, DealerChannel] = {}
        self._movers: dict[PeerId, PutSource] = {}
        self._checksums = RunningChecksums(source.pool)
        self._device_checksums = None if source.device_blocks is None else DeviceChecksums(source.device_blocks.checksums)
        self._on_device: set[PeerId] = set()  # written from the cache on the GPU itself
        self._wanted_at: dict[PeerId, float] = {}  # when each peer was last asked for anew
        self._looked = 0.0
        self._held_back: dict[PeerId, list[tuple[int, Callable[[], None]]]] = {}
        self._unsettled: set[int] = set()  # leases under which something may still land that a closed mover had begun
        self.transfers = TransferClock()

    @property
    def pending(self) -> bool:
        """Whether blocks have not left yet: then ``receive`` is to be called soon."""
        return any(mover.pending() for mover in self._movers.values())

    def rename(self, incarnation: int, poller: zmq.Poller) -> None:
        """From now on it speaks as this incarnation; all channels of the old one are closed."""
        self.close()
        self._incarnation, self._poller = incarnation, poller

    def receive(self, ready: set[object], now: float) -> None:
        """What the peers have said goes to the sender; transfers go on."""
        for peer, channel in list(self._channels.items()):
            if channel.socket in ready:
                for message in channel.receive(RECEIVE_LIMIT):
                    self._hear(peer, message, now)
        for peer, mover in list(self._movers.items()):
            self._with_mover(peer, mover.poll)
            self._time(peer, mover)
            self._say_held_back(peer)
            self._say_words(peer, self._movers.get(peer))
        if now - self._looked >= (LOOK_S if len(self._sender) else IDLE_LOOK_S):
            self._looked = now
            self._give_up_unreachable(now)

    def _give_up_unreachable(self, now: float) -> None:
        """Handoffs to who cannot be reached are given back; what was leased to us there comes free when the connection is back. Who stays
        away is forgotten: workers that come under new names would pile up."""
        for peer, channel in list(self._channels.items()):
            gone_since = channel.gone_since(now)
            patience_s = BEYOND_REACH_S if channel.ever_connected else FIRST_CONTACT_S
            away_s = 0.0 if gone_since is None else now - max(gone_since, self._wanted_at[peer])
            if away_s > FORGOTTEN_S or (away_s > patience_s and len(self._sender)):
                self._lose(peer, f"decode worker {peer[0]} cannot be reached from here")
            if away_s > FORGOTTEN_S:
                self._forget(peer)
                self._sender.peer_gone(peer)

    def _hear(self, peer: PeerId, message: Message, now: float) -> None:
        if not isinstance(message, BETWEEN_MOVERS):
            self._sender.receive(peer, message, now)
            if isinstance(message, Met) and not same_process(message.incarnation, peer[1]):
                self._replace(peer, RESTARTED)  # another process answers there now
        elif (talking := as_talking_source(self._movers.get(peer))) is not None:
            talking.hear(message)

    def _say_words(self, peer: PeerId, mover: PutSource | None) -> None:
        if (talking := as_talking_source(mover)) is not None:
            for message in talking.words():
                self._send(peer, message)

    def carry_out(self, action: SenderAction) -> None:
        """One action of the sender's. Delivered and Undelivered are its owner's."""
        if isinstance(action, ToPeer):
            lease = action.message.lease if isinstance(action.message, Release) else 0
            self._when_written(action.peer, lease, lambda: self._send(action.peer, action.message))
        elif isinstance(action, Put):
            self._put(action)
        elif isinstance(action, SendPlaced):
            self._when_written(action.peer, action.lease, lambda: self._send_placed(action))
        elif isinstance(action, SendHandoff):
            self._when_written(action.peer, action.lease, lambda: self._send_handoff(action))
        elif isinstance(action, CancelPuts):
            if action.peer in self._movers:
                self._movers[action.peer].cancel(action.lease)
        elif isinstance(action, Connect):
            self._connect(action)
        elif isinstance(action, OpenMover):
            self._with_mover(action.peer, lambda: self._open_mover(action))

    def stop_writing(self, poller: zmq.Poller) -> None:
        """Ends all movers; channels stay, registered with ``poller`` instead."""
        for peer, channel in self._channels.items():
            self._close_mover(peer)
            self._poller.unregister(channel.socket)
            poller.register(channel.socket, zmq.POLLIN)
        self._poller = poller

    def close(self) -> None:
        """Ends all channels and movers; what has not left is lost."""
        for peer in list(self._channels):
            self._forget(peer)

    def _connect(self, action: Connect) -> None:
        peer = (action.peer.worker_id, action.peer.incarnation)
        others = self._others(peer)
        if any(is_earlier(peer[1], other[1]) for other in others):
            self._sender.peer_lost(peer, FENCED)  # wanted by a prompt that has waited since then
            return
        for other in others:
            if is_earlier(other[1], peer[1]):
                self._replace(other, FENCED)
        self._wanted_at[peer] = time.monotonic()
        if peer in self._channels:
            return  # it was given up, and is met again
        identity = identity_of(self._worker_id, self._incarnation, peer[1])
        channel = DealerChannel.connect(action.peer.address, identity, self._key, FROM_DECODE)
        self._channels[peer] = channel
        self._poller.register(channel.socket, zmq.POLLIN)

    def _others(self, peer: PeerId) -> list[PeerId]:
        """What else goes by that name: other incarnations of its process, and other processes."""
        return [other for other in self._channels if other[0] == peer[0] and other != peer]

    def _replace(self, peer: PeerId, reason: str) -> None:
        """Another incarnation of this name is spoken to from now on."""
        self._forget(peer)
        self._sender.peer_lost(peer, reason)

    def _open_mover(self, action: OpenMover) -> None:
        for other in self._others(action.peer):
            self._replace(other, RESTARTED)  # the one that answers is the one that is here, whichever number it has
        device = self._source.device_blocks
        self._movers[action.peer] = open_source(action.met, self._source.pool, self._plaintext, device)
        if device is not None and action.met.mover in ON_DEVICE:
            self._on_device.add(action.peer)
        else:
            self._on_device.discard(action.peer)
        _log.info("hands KV blocks to %s by %s", action.peer[0], action.met.mover)

    def _put(self, action: Put) -> None:
        source = self._source
        blocks = [block for _, block, _ in action.items]
        first, end = action.layers or (0, source.num_layers)
        num_bytes = source.pool[0].nbytes * len(blocks) * (end - first) // source.num_layers
        self.transfers.put(action.peer, num_bytes, time.monotonic())

        def put() -> None:
            if action.peer not in self._on_device:
                source.fetch(blocks, first, end - first)
            mover = self._movers[action.peer]
            mover.put(action.lease, action.secret, action.items, first, end - first)
            self._time(action.peer, mover)

        if action.peer in self._movers:  # else it has failed a moment ago, and what was under way has been given back
            self._with_mover(action.peer, put)
            self._say_words(action.peer, self._movers.get(action.peer))
        self._sums(action.peer).add(blocks, first, end - first)

    def _sums(self, peer: PeerId) -> RunningChecksums | DeviceChecksums:
        if peer in self._on_device and self._device_checksums is not None:
            return self._device_checksums
        return self._checksums

    def _time(self, peer: PeerId, mover: PutSource) -> None:
        if not mover.pending() and (burst := self.transfers.settled(peer, time.monotonic())) is not None:
            self._sender.moved(peer, *burst)

    def _send(self, peer: PeerId, message: Message) -> None:
        if peer in self._channels:
            self._channels[peer].send(message)

    def _when_written(self, peer: PeerId, lease: int, say: Callable[[], None]) -> None:
        """``say`` tells the peer that blocks of this lease can be read, or given to others: not while a put may still be writing. Where
        nobody will know it is not said: the peer shuts us out before it gives those blocks to others."""
        mover = self._movers.get(peer)
        if lease in self._unsettled:
            return
        if lease and mover is not None and mover.writing(lease):
            self._held_back.setdefault(peer, []).append((lease, say))
        else:
            say()

    def _say_held_back(self, peer: PeerId) -> None:
        mover, held_back = self._movers.get(peer), self._held_back.pop(peer, [])
        for lease, say in held_back:
            if mover is not None and mover.writing(lease):
                self._held_back.setdefault(peer, []).append((lease, say))
            else:
                say()

    def _send_placed(self, action: SendPlaced) -> None:
        if action.peer in self._channels:
            sums = u64(self._sums(action.peer).of(action.source_blocks))
            self._send(action.peer, Placed(lease=action.lease, first=action.first, checksums=sums))

    def _send_handoff(self, action: SendHandoff) -> None:
        if action.peer in self._channels:
            sums = u64(self._sums(action.peer).of(action.source_blocks))
            handoff = action.message(sums, time.monotonic())
            self._send(action.peer, handoff)

    def _with_mover(self, peer: PeerId, use: Callable[[], object]) -> None:
        """A mover that fails ends the handoffs to that peer; the coordinator tries them again. The channel stays: what is leased to us
        there comes free when it hears that we have stopped."""
        try:
            if peer in self._channels:
                use()
        except PeerEnded as error:
            self._lose(peer, f"decode worker {peer[0]}: {error}")
        except (TransportError, KeyError) as error:
            self._close_mover(peer)
            falls_back = self._sender.mover_failed(peer, str(error))
            what_now = f"; from now on by {FALLBACK_MOVER}" if falls_back else ""
            _log.warning("cannot hand KV blocks to %s: %s%s", peer[0], error, what_now)

    def _lose(self, peer: PeerId, reason: str) -> None:
        """Its handoffs are given back."""
        self._close_mover(peer)
        self._sender.peer_lost(peer, reason)

    def _close_mover(self, peer: PeerId) -> None:
        if (mover := self._movers.pop(peer, None)) is not None:
            self._unsettled.update(mover.close())
            self._say_words(peer, mover)  # its last ones
            self.transfers.forget(peer)
        self._held_back.pop(peer, None)  # Handoff is of no use any more, and Release is said again where it is asked for

    def _forget(self, peer: PeerId) -> None:
        self._close_mover(peer)
        if (channel := self._channels.pop(peer, None)) is not None:
            del self._wanted_at[peer]
            self._poller.unregister(channel.socket)
            channel.close()
