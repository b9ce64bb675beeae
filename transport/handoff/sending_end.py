"""The sending side's shell: channels to decode workers, movers into their pools, checksums of what leaves.

A prefill worker has one for all its handoffs; a decode worker has one for the sequences that it hands to
others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from ..channels.coordinator_link import identity_of
from ..environment import Channel, Environment, Network
from ..errors import PeerEnded, TransportError
from ..messages.incarnation import is_earlier, same_process
from ..messages.messages import BETWEEN_MOVERS, FROM_DECODE, Message, Met, PeerId, Placed, Release, u64
from ..movers.interface import FALLBACK_MOVER, PutSource, as_talking_source
from .held_back import HeldBack
from .layer_slicing import TransferClock
from .protocol import CancelPuts, Connect, OpenMover, Put, SenderAction, SendHandoff, SendPlaced, ToPeer
from .reachability import Reachability, ReachTimes
from .sender import HandoffSender

RECEIVE_LIMIT = 256
LOOK_S, IDLE_LOOK_S = 0.05, 1.0
FENCED = "the decode worker has been fenced, and goes on as a new incarnation"
RESTARTED = "the decode worker has been started anew"
_log = logging.getLogger(__name__)


class SendingEnd:
    """Carries out the actions of a ``HandoffSender``. Channels are opened under ``incarnation``."""

    def __init__(
        self,
        sender: HandoffSender,
        worker_id: str,
        incarnation: int,
        environment: Environment,
        times: ReachTimes | None = None,
    ) -> None:
        self._sender, self._worker_id, self._incarnation = sender, worker_id, incarnation
        self._clock, self._network = environment.clock, environment.network
        self._device, self._mover = environment.device, environment.mover
        self._channels: dict[PeerId, Channel] = {}
        self._movers: dict[PeerId, PutSource] = {}
        self._mover_names: dict[PeerId, str] = {}
        self._reachability = Reachability(times)
        self._looked = float("-inf")
        self._held_back = HeldBack()
        self.transfers = TransferClock()

    @property
    def pending(self) -> bool:
        """Whether blocks have not left yet: then ``receive`` is to be called soon."""
        return any(mover.pending() for mover in self._movers.values())

    def rename(self, incarnation: int) -> None:
        """Close all channels; those opened from now on are this incarnation's."""
        self.close()
        self._incarnation = incarnation

    def receive(self, ready: set[object], now: float) -> None:
        """Pass on what the peers have sent; transfers go on."""
        for peer, channel in list(self._channels.items()):
            if channel.socket in ready:
                for message in channel.receive(RECEIVE_LIMIT):
                    self._receive(peer, message, now)
        for peer, mover in list(self._movers.items()):
            self._with_mover(peer, mover.poll)
            self._time(peer, mover)
            self._held_back.written(peer, self._writing(peer))
            self._send_mover_messages(peer, self._movers.get(peer))
        if now - self._looked >= (LOOK_S if len(self._sender) else IDLE_LOOK_S):
            self._looked = now
            self._give_up_unreachable(now)

    def carry_out(self, action: SenderAction) -> None:
        """One action of the sender's. Delivered and Undelivered are its owner's."""
        if isinstance(action, ToPeer):
            lease = action.message.lease if isinstance(action.message, Release) else 0
            self._send_when_written(action.peer, lease, lambda: action.message)
        elif isinstance(action, Put):
            self._put(action)
        elif isinstance(action, SendPlaced):
            self._send_when_written(action.peer, action.lease, lambda: self._placed(action))
        elif isinstance(action, SendHandoff):
            self._send_when_written(
                action.peer, action.lease, lambda: action.message(self._sums_of(action), self._clock.now())
            )
        elif isinstance(action, CancelPuts):
            if action.peer in self._movers:
                self._movers[action.peer].cancel(action.lease)
        elif isinstance(action, Connect):
            self._connect(action)
        elif isinstance(action, OpenMover):
            self._with_mover(action.peer, lambda: self._open_mover(action))

    def stop_writing(self) -> Network:
        """End all movers. Returns the network to which the channels belong from now on."""
        for peer in self._channels:
            self._close_mover(peer)
        self._network = self._network.hand_over(list(self._channels.values()))
        return self._network

    def close(self) -> None:
        """End all channels and movers; what has not left is lost."""
        for peer in list(self._channels):
            self._forget(peer)

    def _give_up_unreachable(self, now: float) -> None:
        """Handoffs to a peer that cannot be reached are given back; what was leased to us there comes free
        when the connection is back. A peer that stays away is forgotten: workers that come under new names
        would pile up."""
        for peer, channel in list(self._channels.items()):
            gone_since = channel.gone_since(now)
            verdict = self._reachability.judge(peer, gone_since, channel.ever_connected, now)
            if verdict == "forgotten" or (verdict == "lost" and len(self._sender)):
                self._close_mover(peer)
                self._sender.peer_lost(peer, f"decode worker {peer[0]} cannot be reached from here")
            if verdict == "forgotten":
                self._forget(peer)
                self._sender.peer_gone(peer)

    def _receive(self, peer: PeerId, message: Message, now: float) -> None:
        if not isinstance(message, BETWEEN_MOVERS):
            self._sender.receive(peer, message, now)
            if isinstance(message, Met) and not same_process(message.incarnation, peer[1]):
                self._replace(peer, RESTARTED)
                self._sender.peer_restarted(peer)
        elif (talking := as_talking_source(self._movers.get(peer))) is not None:
            talking.hear(message)

    def _connect(self, action: Connect) -> None:
        """Of two incarnations of one process the later one is there. Of two processes of one name, whichever
        answers."""
        peer = (action.peer.worker_id, action.peer.incarnation)
        others = self._others(peer)
        if any(is_earlier(peer[1], other[1]) for other in others):
            self._sender.peer_lost(peer, FENCED)  # wanted by a prompt that has waited since then
            return
        for other in others:
            if is_earlier(other[1], peer[1]):
                self._replace(other, FENCED)
        self._reachability.wanted(peer, self._clock.now())
        if peer not in self._channels:  # else it was given up, and is met again
            identity = identity_of(self._worker_id, self._incarnation, peer[1])
            self._channels[peer] = self._network.connect(action.peer.address, identity, FROM_DECODE)

    def _others(self, peer: PeerId) -> list[PeerId]:
        """Other incarnations of its process, and other processes of its name."""
        return [other for other in self._channels if other[0] == peer[0] and other != peer]

    def _replace(self, peer: PeerId, reason: str) -> None:
        """Another incarnation of this name is spoken to from now on."""
        self._forget(peer)
        self._sender.peer_lost(peer, reason)

    def _open_mover(self, action: OpenMover) -> None:
        for other in self._others(action.peer):
            self._replace(
                other, RESTARTED
            )  # the one that answers is the one that is here, whichever number it has
        self._movers[action.peer] = self._mover.open(action.met)
        self._mover_names[action.peer] = action.met.mover
        _log.info("hands KV blocks to %s by %s", action.peer[0], action.met.mover)

    def _put(self, action: Put) -> None:
        device, name = self._device, self._mover_names.get(action.peer, "")
        blocks = [block for _, block, _ in action.items]
        first, end = action.layers or (0, device.num_layers)
        num_bytes = device.block_bytes * len(blocks) * (end - first) // device.num_layers
        self.transfers.put(action.peer, num_bytes, self._clock.now())

        def put() -> None:
            device.fetch(name, blocks, first, end - first)
            mover = self._movers[action.peer]
            mover.put(action.lease, action.secret, action.items, first, end - first)
            self._time(action.peer, mover)

        if (
            action.peer in self._movers
        ):  # else it has failed a moment ago, and what was under way has been given back
            self._with_mover(action.peer, put)
            self._send_mover_messages(action.peer, self._movers.get(action.peer))
        device.add_sent(name, blocks, first, end - first)

    def _time(self, peer: PeerId, mover: PutSource) -> None:
        if not mover.pending() and (burst := self.transfers.settled(peer, self._clock.now())) is not None:
            self._sender.moved(peer, *burst)

    def _writing(self, peer: PeerId) -> Callable[[int], bool]:
        """Whether a put to this peer under a certain lease may still be writing."""
        mover = self._movers.get(peer)
        return (lambda lease: False) if mover is None else mover.writing

    def _send_when_written(self, peer: PeerId, lease: int, make: Callable[[], Message]) -> None:
        def send() -> None:
            if (channel := self._channels.get(peer)) is not None:
                channel.send(make())

        self._held_back.send(peer, lease, self._writing(peer), send)

    def _placed(self, action: SendPlaced) -> Placed:
        return Placed(lease=action.lease, first=action.first, checksums=self._sums_of(action))

    def _sums_of(self, action: SendPlaced | SendHandoff) -> bytes:
        return u64(self._device.sent_checksums(self._mover_names.get(action.peer, ""), action.source_blocks))

    def _send_mover_messages(self, peer: PeerId, mover: PutSource | None) -> None:
        if (talking := as_talking_source(mover)) is not None and (
            channel := self._channels.get(peer)
        ) is not None:
            for message in talking.words():
                channel.send(message)

    def _with_mover(self, peer: PeerId, use: Callable[[], object]) -> None:
        """A mover that fails ends the handoffs to that peer; the coordinator tries them again. The channel
        stays: what is leased to us there comes free when the peer learns that we have stopped."""
        try:
            if peer in self._channels:
                use()
        except PeerEnded as error:
            self._close_mover(peer)
            self._sender.peer_lost(peer, f"decode worker {peer[0]}: {error}")
        except (TransportError, KeyError) as error:
            self._close_mover(peer)
            falls_back = self._sender.mover_failed(peer, str(error))
            what_now = f"; from now on by {FALLBACK_MOVER}" if falls_back else ""
            _log.warning("cannot hand KV blocks to %s: %s%s", peer[0], error, what_now)

    def _close_mover(self, peer: PeerId) -> None:
        unsettled: Collection[int] = ()
        if (mover := self._movers.pop(peer, None)) is not None:
            unsettled = mover.close()
            self._send_mover_messages(peer, mover)  # its last ones
            self.transfers.forget(peer)
        self._held_back.close(peer, unsettled)

    def _forget(self, peer: PeerId) -> None:
        self._close_mover(peer)
        if (channel := self._channels.pop(peer, None)) is not None:
            self._reachability.forget(peer)
            self._network.close(channel)
