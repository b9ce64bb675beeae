"""The sending side's shell, one for all handoffs of a worker: channels to decode workers, movers into their
pools, checksums of sent blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

from ..channels.coordinator_link import identity_of
from ..environment import Channel, Environment, Network
from ..errors import AddressError, PeerEnded, TransportError
from ..messages.fields import is_earlier, same_process
from ..messages.messages import BETWEEN_MOVERS, FROM_DECODE, Message, Met, PeerId, Placed, Release, u64
from ..movers.interface import FALLBACK_MOVER, PutSource, as_talking_source
from .held_back import HeldBack, Writing
from .layer_slicing import TransferClock
from .protocol import (
    CancelPuts,
    CloseMover,
    Connect,
    OpenMover,
    Put,
    SenderAction,
    SendHandoff,
    SendPlaced,
    ToPeer,
    Undelivered,
    WriteTestBlock,
)
from .reachability import Reachability, ReachTimes
from .sender import HandoffSender

RECEIVE_LIMIT = 256
RETIRE_TICK_S = 0.05
LOOK_S, IDLE_LOOK_S = 0.05, 1.0  # between two looks for unreachable peers
FENCED = "the receiving worker had been declared dead, and has registered anew"
RESTARTED = "the receiving worker has been started anew"
_log = logging.getLogger(__name__)


class SendingEnd:
    """Carries out the actions of a ``HandoffSender``. Channels are opened under ``worker``'s name."""

    def __init__(
        self, sender: HandoffSender, worker: PeerId, environment: Environment, times: ReachTimes | None = None
    ) -> None:
        self.sender, (self._worker_id, self._incarnation) = sender, worker
        self._clock, self._network = environment.clock, environment.network
        self._device, self._mover = environment.device, environment.mover
        self._channels: dict[PeerId, Channel] = {}
        self._movers: dict[PeerId, PutSource] = {}
        self._moving: dict[PeerId, None] = {}  # in order; the movers of the others have nothing to do
        self._reachability = Reachability(times)
        self._looked = float("-inf")
        self._held_back = HeldBack()
        self.transfers = TransferClock()

    @property
    def pending(self) -> bool:
        """Whether blocks have not left yet: then ``receive`` is to be called soon."""
        return any(self._movers[peer].pending() for peer in self._moving)

    def rename(self, incarnation: int) -> None:
        """Close all channels; those opened from now on are this incarnation's."""
        self.close()
        self._incarnation = incarnation

    def receive(self, ready: set[object], now: float) -> None:
        """Pass the peers' messages on, and keep the transfers going."""
        for peer, channel in list(self._channels.items()) if ready else ():
            if channel.socket in ready:
                for message in channel.receive(RECEIVE_LIMIT):
                    self._receive(peer, message, now)
        looks = now - self._looked >= (LOOK_S if self.sender.outgoing else IDLE_LOOK_S)
        for peer in list(self._movers if looks else self._moving):
            if (mover := self._movers.get(peer)) is None:
                continue
            self._with_mover(peer, mover.poll)
            self._time(peer, mover)
            self._held_back.written(peer, _writing(self._movers.get(peer)))
            _pass_messages(self._movers.get(peer), self._channels.get(peer))
            if not mover.pending() and as_talking_source(mover) is None and not self._held_back.waits(peer):
                self._moving.pop(peer, None)
        if looks:
            self._looked = now
            self._give_up_unreachable(now)

    def carry_out(self, action: SenderAction) -> None:
        """Carry out one action of the sender; its owner has to take Delivered and Undelivered."""
        if isinstance(action, ToPeer):
            lease = action.message.lease if isinstance(action.message, Release) else 0
            self._send_when_written(action.peer, lease, lambda: action.message)
        elif isinstance(action, Put):
            self._put(action)
        elif isinstance(action, SendPlaced | SendHandoff):
            checksums = u64(self._device.sent_checksums(action.source_blocks))  # now: blocks may be reused
            self._send_when_written(action.peer, action.lease, lambda: self._with(checksums, action))
        elif isinstance(action, CancelPuts):
            if action.peer in self._movers:
                self._movers[action.peer].cancel(action.lease)
        elif isinstance(action, Connect):
            self._connect(action)
        elif isinstance(action, OpenMover):
            self._with_mover(action.peer, lambda: self._open_mover(action))
        elif isinstance(action, WriteTestBlock) and action.peer in self._movers:
            self._with_mover(action.peer, partial(self._device.write_test_block, *action[1:]))
        elif isinstance(action, CloseMover):
            self._close_mover(action.peer)
            if action.error:
                _log.error("%s", action.error)

    def stop_writing(self) -> Network:
        """End all movers. Return the network to which the channels belong from now on."""
        for peer in self._channels:
            self._close_mover(peer)
        self._network = self._network.hand_over(list(self._channels.values()))
        return self._network

    def close(self) -> None:
        """End all channels and movers; blocks that have not left are lost."""
        for peer in list(self._channels):
            self._forget(peer)

    def _give_up_unreachable(self, now: float) -> None:
        """Fail the handoffs to a peer that cannot be reached; their leases there end when the connection is
        back. Forget a peer that stays away: workers that come under new names would pile up."""
        for peer, channel in list(self._channels.items()):
            gone_since = channel.gone_since(now)
            verdict = self._reachability.judge(peer, gone_since, channel.ever_connected, now)
            if verdict == "forgotten" or (verdict == "lost" and self.sender.outgoing):
                self._close_mover(peer)
                lost = f"worker {peer[0]} cannot be reached from here"
                if any(out.peer == peer for out in self.sender.outgoing.values()):
                    _log.warning("%s: check the network, and its --listen and --advertise-host", lost)
                self.sender.peer_lost(peer, lost)
            if verdict == "forgotten":
                self._forget(peer)
                self.sender.meetings.retirement.forget(peer[0])

    def _receive(self, peer: PeerId, message: Message, now: float) -> None:
        if not isinstance(message, BETWEEN_MOVERS):
            self.sender.receive(peer, message, now)
            if isinstance(message, Met) and not same_process(message.incarnation, peer[1]):
                self._replace(peer, RESTARTED)
                self.sender.meetings.retirement.restarted(peer)
        elif (talking := as_talking_source(self._movers.get(peer))) is not None:
            talking.receive(message)

    def _connect(self, action: Connect) -> None:
        """Open a channel. Of two incarnations of one process the later one is there. Of two processes of one
        name, it is the one that answers."""
        peer = (action.peer.worker_id, action.peer.incarnation)
        others = self._others(peer)
        if any(is_earlier(peer[1], other[1]) for other in others):
            self.sender.peer_lost(peer, FENCED)  # wanted by a prompt that has waited since then
            return
        for other in others:
            if is_earlier(other[1], peer[1]):
                self._replace(other, FENCED)
        if peer not in self._channels:  # else it was given up, and is met again
            identity = identity_of(self._worker_id, self._incarnation, peer[1])
            try:
                self._channels[peer] = self._network.connect(action.peer.address, identity, FROM_DECODE)
            except AddressError as error:  # its --advertise-host
                self.sender.peer_lost(peer, f"worker {peer[0]}: {error}")
                return
        self._reachability.wanted(peer, self._clock.now())

    def _others(self, peer: PeerId) -> list[PeerId]:
        """Return other incarnations of its process, and other processes of its name."""
        return [other for other in self._channels if other[0] == peer[0] and other != peer]

    def _replace(self, peer: PeerId, reason: str) -> None:
        """Give up this peer: another incarnation has taken its name."""
        self._forget(peer)
        self.sender.peer_lost(peer, reason)

    def _open_mover(self, action: OpenMover) -> None:
        for other in self._others(action.peer):  # the peer that answers is there, whichever number it has
            self._replace(other, RESTARTED)
            self.sender.meetings.retirement.restarted(other)
        self._movers[action.peer] = self._mover.open(action.met)
        self._moving[action.peer] = None
        if action.left_out:
            _log.warning("%s; %s is used instead", action.left_out, action.met.mover)
        _log.info("hands KV blocks to %s by %s", action.peer[0], action.met.mover)

    def _put(self, action: Put) -> None:
        device = self._device
        blocks = [block for _, block, _ in action.items]
        first, end = action.layers or (0, device.num_layers)
        num_bytes = device.block_bytes * len(blocks) * (end - first) // device.num_layers
        if not self.sender.meetings.is_testing(action.peer):
            self.transfers.put(action.peer, num_bytes, self._clock.now())

        def put() -> None:
            mover = self._movers[action.peer]
            mover.put(action.lease, action.secret, action.items, first, end - first)
            self._time(action.peer, mover)

        if action.peer in self._movers:  # else it has failed a moment ago, and its handoffs have ended
            self._moving[action.peer] = None
            self._with_mover(action.peer, put)
            _pass_messages(self._movers.get(action.peer), self._channels.get(action.peer))
        device.add_sent(blocks, first, end - first)

    def _time(self, peer: PeerId, mover: PutSource) -> None:
        if mover.pending():
            return
        if (burst := self.transfers.settled(peer, self._clock.now())) is not None:
            self.sender.meetings.note_transfer(peer, *burst)

    def _send_when_written(self, peer: PeerId, lease: int, make: Callable[[], Message]) -> None:
        def send() -> None:
            if (channel := self._channels.get(peer)) is not None:
                channel.send(make())

        self._held_back.send(peer, lease, _writing(self._movers.get(peer)), send)

    def _with(self, checksums: bytes, action: SendPlaced | SendHandoff) -> Message:
        if isinstance(action, SendHandoff):
            return action.message(checksums, self._clock.now())
        return Placed(lease=action.lease, first=action.first, checksums=checksums)

    def _with_mover(self, peer: PeerId, use: Callable[[], object]) -> None:
        """Call ``use``. A mover that fails ends the handoffs to that peer; the coordinator retries them. The
        channel stays: the peer's leases for this worker end when it learns that the writing has stopped."""
        try:
            if peer in self._channels:
                use()
        except PeerEnded as error:
            self._close_mover(peer)
            self.sender.peer_lost(peer, f"worker {peer[0]}: {error}")
        except (TransportError, KeyError) as error:
            self._close_mover(peer)
            if self.sender.meetings.is_testing(peer):
                self.sender.test_failed(peer, str(error))
                return
            falls_back = self.sender.mover_failed(peer, str(error))
            what_now = f"; from now on by {FALLBACK_MOVER}" if falls_back else ""
            _log.warning("cannot hand KV blocks to %s: %s%s", peer[0], error, what_now)

    def _close_mover(self, peer: PeerId) -> None:
        unsettled: Collection[int] = ()
        self._moving.pop(peer, None)
        if (mover := self._movers.pop(peer, None)) is not None:
            unsettled = mover.close()
            _pass_messages(mover, self._channels.get(peer))  # its last ones
            self.transfers.forget(peer)
        self._held_back.close(peer, unsettled)

    def _forget(self, peer: PeerId) -> None:
        self._close_mover(peer)
        if (channel := self._channels.pop(peer, None)) is not None:
            self._reachability.forget(peer)
            self._network.close(channel)


def _writing(mover: PutSource | None) -> Writing:
    return (lambda lease: False) if mover is None else mover.writing


def _pass_messages(mover: PutSource | None, channel: Channel | None) -> None:
    """Send the mover's own messages to its other end."""
    if channel is not None and (talking := as_talking_source(mover)) is not None:
        for message in talking.take_messages():
            channel.send(message)


class RetiringEnd:
    """The sending end of a role that is over, in a process that goes on: it sends Retire to the decode
    workers that may hold blocks for it, until each has answered. Its owner calls ``turn`` again and again
    until it ``is_over``, then ``close``."""

    def __init__(self, end: SendingEnd) -> None:
        """``end``: of a worker at rest, of which nothing else is used any more."""
        self._end, self._sender = end, end.sender
        self._ticked = float("-inf")
        self._network = end.stop_writing()
        self._sender.retire()

    @property
    def is_over(self) -> bool:
        return self._sender.meetings.retirement.is_complete

    def turn(self, now: float) -> None:
        """Send what is due, and receive the answers."""
        self._end.receive(self._network.ready(), now)
        if now - self._ticked >= RETIRE_TICK_S:
            self._ticked = now
            self._sender.tick(now)
        for action in self._sender.take():
            assert not isinstance(action, Undelivered), "a worker at rest hands nothing over"
            self._end.carry_out(action)

    def close(self) -> None:
        self._end.close()
