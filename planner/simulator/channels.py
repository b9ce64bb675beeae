"""Channels between simulated workers, and to the coordinator, in virtual time: no message is lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from msgspec.structs import replace

from ...transport.environment import Channel, Listener
from ...transport.messages.messages import Handoff, Load, Message, Placed
from .cluster import Pool
from .events import EventQueue
from .link import HOST, Link

COORDINATOR = "tcp://coordinator:0"


class CoordinatorSocket(Protocol):
    """The coordinator, as workers reach it."""

    def receive_from(self, identity: bytes, messages: Sequence[Message]) -> None:
        """Receive messages that a worker has sent together."""


class Process(Protocol):
    """A process, as its environment sees it."""

    queue: EventQueue
    fabric: Fabric
    pool: Pool
    link: Link
    message_s: float
    is_alive: bool
    catching_up: bool
    """The coordinator knows what it sends now."""

    def alive(self) -> bool:
        """See ``LocalProcess``."""

    def turn(self) -> None:
        """One turn of the loop, if the process lives."""


class Fabric:
    """What the living processes have opened, and the coordinator."""

    coordinator: CoordinatorSocket

    def __init__(self) -> None:
        self.channels: dict[bytes, CoordinatorChannel] = {}  # by identity
        self.listeners: dict[str, SimulatedListener] = {}  # by port
        self.processes: dict[int, Process] = {}  # by pid

    def link_at(self, port: str) -> Link | None:
        """Return the link of the process that listens there."""
        listener = self.listeners.get(port)
        return listener.process.link if listener is not None else None

    def remove(self, pid: int) -> None:
        """The process has ended."""
        process = self.processes.pop(pid)
        for channel in [channel for channel in self.channels.values() if channel.process is process]:
            channel.close()
        for listener in [one for one in self.listeners.values() if one.process is process]:
            listener.close()


class _Channel:
    """The receiving half of a channel."""

    ever_connected = True

    def __init__(self, network: SimulatedNetwork, identity: bytes) -> None:
        self.network, self.process, self.identity = network, network.owner, identity
        self._inbox: list[Message] = []

    @property
    def socket(self) -> object:
        return self

    def receive(self, limit: int) -> list[Message]:
        messages, self._inbox = self._inbox, []
        self.network.readable.discard(self)
        return messages

    def deliver(self, messages: Sequence[Message]) -> None:
        """Messages have arrived."""
        if self.process.is_alive:
            self._inbox += messages
            self.network.readable.add(self)
            self.process.turn()


class CoordinatorChannel(_Channel):
    """A role's channel to the coordinator."""

    def __init__(self, network: SimulatedNetwork, identity: bytes) -> None:
        super().__init__(network, identity)
        self.process.fabric.channels[identity] = self

    def gone_since(self, now: float) -> float | None:
        return None

    def send(self, *messages: Message) -> bool:
        process = self.process
        if type(messages[0]) is Load:
            self.network.reported_at = process.queue.now
        if not process.catching_up:
            receive = process.fabric.coordinator.receive_from
            process.queue.after(process.message_s, receive, self.identity, messages)
        return True

    def close(self) -> None:
        self.process.fabric.channels.pop(self.identity, None)
        self.network.readable.discard(self)


class PeerChannel(_Channel):
    """A channel to a decode worker."""

    def __init__(self, network: SimulatedNetwork, identity: bytes, target: SimulatedListener | None) -> None:
        """``target``: None where nothing listens at the address."""
        super().__init__(network, identity)
        self._target = target
        self._gone_since: float | None = None

    def gone_since(self, now: float) -> float | None:
        if self._gone_since is None and (self._target is None or not self._target.is_open):
            self._gone_since = now
        return self._gone_since

    def send(self, *messages: Message) -> bool:
        if self._target is not None:
            for message in messages:
                self._target.bring(self, message)
        return True

    def close(self) -> None:
        if self._target is not None:
            self._target.channels.pop(self.identity, None)
        self.network.readable.discard(self)


class SimulatedListener:
    """A decode worker's port for other workers, and its end of the link."""

    def __init__(self, network: SimulatedNetwork, address: str) -> None:
        self._network, self.process, self.address = network, network.owner, address
        self.channels: dict[bytes, PeerChannel] = {}  # that have sent something, by identity
        self._closed = False
        self._inbox: list[tuple[bytes, Message]] = []
        self._checked_at = 0.0  # when all blocks that were announced so far will have been verified
        self.process.fabric.listeners[port_of(address)] = self

    @property
    def socket(self) -> object:
        return self

    @property
    def is_open(self) -> bool:
        return self.process.is_alive and not self._closed

    def bring(self, channel: PeerChannel, message: Message) -> None:
        """A message is sent. The worker's loop gets it when its blocks have been verified, those of one after
        those of the other; the time since the first token goes on meanwhile."""
        arrives = done = self.process.queue.now + channel.process.message_s
        if isinstance(message, Placed | Handoff):
            profile, num_blocks = self.process.pool.profile, len(message.checksums) // 8
            seconds = num_blocks * profile.memory.block_bytes / profile.handoff.check_bytes_per_s
            self._checked_at = max(arrives, self._checked_at) + seconds
            done = self._checked_at + profile.handoff.join_s
            if isinstance(message, Handoff):
                message = replace(message, since_s=message.since_s + (done - arrives))
        self.process.queue.at(done, self.deliver, channel, message)

    def send(self, peer: bytes, *messages: Message) -> bool:
        if (channel := self.channels.get(peer)) is None:
            return False
        self.process.queue.after(self.process.message_s, channel.deliver, messages)
        return True

    def receive(self, limit: int) -> list[tuple[bytes, Message]]:
        messages, self._inbox = self._inbox, []
        self._network.readable.discard(self)
        return messages

    def deliver(self, channel: PeerChannel, message: Message) -> None:
        """A message has arrived, and its blocks have been verified."""
        if self.is_open:
            self.channels[channel.identity] = channel
            self._inbox.append((channel.identity, message))
            self._network.readable.add(self)
            self.process.turn()

    def close(self) -> None:
        self._closed = True
        self.process.fabric.listeners.pop(port_of(self.address), None)
        self._network.readable.discard(self)


class SimulatedNetwork:
    """See ``transport.environment.Network``. ``readable``: the sockets that have something to receive."""

    host = HOST

    def __init__(self, owner: Process, readable: set[object], port: int = 0) -> None:
        """``port``: at which it may listen; no other network has it."""
        self.owner, self.readable, self.port = owner, readable, str(port)
        self.reported_at = -1.0  # when the coordinator was last sent the load

    def connect(self, address: str, identity: bytes, allowed: Collection[type[Message]]) -> Channel:
        if address == COORDINATOR:
            return CoordinatorChannel(self, identity)
        return PeerChannel(self, identity, self.owner.fabric.listeners.get(port_of(address)))

    def listen(self, address: str, allowed: Collection[type[Message]]) -> SimulatedListener:
        return SimulatedListener(self, f"tcp://*:{self.port}")

    def ready(self) -> set[object]:
        return set(self.readable)

    def close(self, channel: Channel | Listener, linger_s: float = 0.0) -> None:
        assert isinstance(channel, CoordinatorChannel | PeerChannel | SimulatedListener)
        channel.close()

    def hand_over(self, channels: Sequence[Channel]) -> SimulatedNetwork:
        other = SimulatedNetwork(self.owner, set())
        for channel in channels:
            assert isinstance(channel, PeerChannel)
            channel.network = other
            if channel in self.readable:
                self.readable.discard(channel)
                other.readable.add(channel)
        return other

    def process(self, pid: int) -> Process | None:
        return self.owner.fabric.processes.get(pid)


def port_of(address: str) -> str:
    """Return the port of an address, which no other listener has."""
    return address.rpartition(":")[2]
