"""Channels in virtual time, for the shells that run live over ZeroMQ: which peers are connected, which
messages have arrived.

A connection is there while the listening process lives, does not stand still for long, and no partition has
lasted for long. The messages themselves are carried by ``network.py``. What is sent and opened here is held
against the rules that both ends of a handoff keep.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence

from simulation.process import Process, VirtualPid

from splitserve.transport.channels.coordinator_link import opened_to, worker_of
from splitserve.transport.messages.fields import has_ended, is_earlier, same_process
from splitserve.transport.messages.messages import (
    Ack,
    Fenced,
    Goodbye,
    Handoff,
    Message,
    OtherVersion,
    PeerId,
    Placed,
    Release,
    RequestFailed,
    Retired,
)

NOTICED_S = 0.5
"""Seconds after which a silent connection is found missing (live: HEARTBEAT_TIMEOUT_MS)."""
PLACED, HANDED_OVER, RELEASED = 1, 2, 3


def name_at(address: str) -> str:
    """Return the name of the worker or coordinator that listens there."""
    return address.rpartition(":")[2].replace("/", ":")


class VirtualNetwork:
    """The network of one process, under ``name`` or its own. ``wakes``: whether its loop waits for it."""

    def __init__(self, process: Process, host: str, name: str = "", wakes: bool = True) -> None:
        self.owner, self.world, self.host = process, process.world, host
        self.name, self.wakes = name or process.name, wakes
        # by our own and the peer's incarnation: movers that failed since one of them handed something over
        self.num_broken: Counter[tuple[PeerId, PeerId]] = Counter()
        self.readable: set[object] = set()
        self.channels: dict[tuple[str, int], VirtualChannel] = {}  # by the peer's name and incarnation
        self._left: set[int] = set()  # incarnations that have sent Goodbye
        self._incarnation = 0  # the newest that a channel was opened under
        self._stages: dict[int, tuple[int, int]] = {}  # of each lease: the last message about its blocks

    def connect(self, address: str, identity: bytes, allowed: Collection[type[Message]]) -> VirtualChannel:
        address = name_at(address)
        self._check_incarnation(address, identity, to_coordinator=Fenced in allowed)
        self._check_addressee(address, opened_to(identity))
        channel = VirtualChannel(self, address, identity, frozenset(allowed))
        self.channels[address, opened_to(identity)] = channel
        return channel

    def listen(self, address: str, allowed: Collection[type[Message]]) -> VirtualListener:
        address = f"tcp://*:{self.name.replace(':', '/')}"
        listener = self.world.listeners[self.name] = VirtualListener(self, address, frozenset(allowed))
        return listener

    def ready(self) -> set[object]:
        return set(self.readable)

    def close(self, channel: VirtualChannel | VirtualListener, linger_s: float = 0.0) -> None:
        channel.closed = True
        self.readable.discard(channel)

    def hand_over(self, channels: Sequence[VirtualChannel]) -> VirtualNetwork:
        other = VirtualNetwork(self.owner, self.host, self.name, wakes=False)
        for channel in channels:
            channel.network = other
            if channel.inbox:
                other.readable.add(channel)
        return other

    def process(self, pid: int) -> VirtualPid:
        return VirtualPid(self.world.pids[pid])

    def woken(self, socket: object) -> None:
        """Something has come to this socket."""
        self.readable.add(socket)
        if self.wakes:
            self.owner.poll()

    def note(self, message: Message, identity: bytes, to_coordinator: bool) -> None:
        """Look at a message that leaves."""
        counts, named = self.world.counts, worker_of(identity)
        if to_coordinator and named is not None:
            if named[1] in self._left and type(message) is not Goodbye:
                self.world.violated(f"{self.name}: sent a {type(message).__name__} after its Goodbye")
            elif type(message) is Goodbye:
                self._left.add(named[1])
        if type(message) is RequestFailed:
            counts[f"given back: {message.kind}"] += 1
            if message.kind != "preempted":
                self.world.given_back.add((message.coordinator, message.dispatch))
        elif type(message) is Goodbye:
            counts["workers drained"] += 1
        else:
            self._check_order(message)

    def _check_order(self, message: Message) -> None:
        """A lease's messages are Placed, in order, then Handoff, then Release, and nothing after that."""
        if isinstance(message, Placed):
            stage = (PLACED, message.first)
        elif isinstance(message, Handoff):
            stage = (HANDED_OVER, 0)
        elif isinstance(message, Release) and message.lease:
            stage = (RELEASED, 0)
        else:
            return
        if stage < self._stages.get(message.lease, stage):
            self.world.violated(
                f"{self.name}: a message of lease {message.lease} was sent after one that was due later"
            )
        self._stages[message.lease] = stage

    def _check_addressee(self, address: str, incarnation: int) -> None:
        """Only one of two incarnations of a process exists: the earlier one's channel is closed first, the
        later one's stays."""
        for (other, number), channel in self.channels.items():
            if (
                other == address
                and number != incarnation
                and same_process(number, incarnation)
                and not channel.closed
            ):
                self.world.violated(
                    f"{self.name}: connects to incarnation {incarnation} of {address} beside {number}"
                )

    def _check_incarnation(self, address: str, identity: bytes, to_coordinator: bool) -> None:
        """A process's incarnations never go back; to a coordinator each opens one channel."""
        named = worker_of(identity)
        assert named is not None
        again = (
            to_coordinator
            and (known := self.channels.get((address, 0))) is not None
            and worker_of(known.identity) == named
        )
        if named[1] < self._incarnation or again:
            self.world.violated(
                f"{self.name}: incarnation {named[1]} came after {self._incarnation}, or twice"
            )
        self._incarnation = max(self._incarnation, named[1])


class VirtualChannel:
    """The connecting end."""

    def __init__(
        self, network: VirtualNetwork, address: str, identity: bytes, allowed: frozenset[type[Message]]
    ) -> None:
        self.network, self.world = network, network.world
        self.address, self.identity, self._allowed = address, identity, allowed
        self.number = self.world.next_number()
        self.inbox: deque[Message] = deque()
        self.closed = self.ever_connected = False
        self._newest = 0  # number of the listening process that was last received from
        self._gone_since: float | None = network.owner.now

    @property
    def socket(self) -> object:
        return self

    def gone_since(self, now: float) -> float | None:
        if self.world.connected(self.network, self.address):
            self.ever_connected, self._gone_since = True, None
        elif self._gone_since is None:
            self._gone_since = now
        return self._gone_since

    def send(self, *messages: Message) -> bool:
        """What a process sends that was stopped in the middle of its turn leaves when it goes on."""
        process = self.network.owner
        if self.closed or not process.alive:
            return False
        if process.frozen:
            process.run(self._send, messages)
        else:
            self._send(messages)
        return True

    def _send(self, messages: Sequence[Message]) -> None:
        if (listener := self.world.listeners.get(self.address)) is not None:
            listener.on_the_way[self.identity] += len(messages)
        for message in messages:
            self.network.note(message, self.identity, Fenced in self._allowed)
            self.world.network.send(self.network.name, self.address, message, self._reach)

    def receive(self, limit: int) -> list[Message]:
        messages = list(self.inbox)
        self.inbox.clear()
        self.network.readable.discard(self)
        return messages

    def come(self, speaker: int, message: Message) -> None:
        """From the process of this number; the address may be another process's by now."""
        self.network.owner.run(self._arrive, speaker, message)

    def _reach(self, message: Message) -> None:
        if (listener := self.world.listeners.get(self.address)) is not None:
            listener.on_the_way[self.identity] -= 1
            listener.come(self, message)

    def _arrive(self, speaker: int, message: Message) -> None:
        if self.closed or speaker < self._newest:  # one connection's messages come in order
            return
        if type(message) not in self._allowed:
            self.world.violated(f"{self.network.name}: got a {type(message).__name__} from {self.address}")
        self._newest = speaker
        if isinstance(message, Ack) and (named := worker_of(self.identity)) is not None:
            self.network.num_broken.pop((named, (self.address, opened_to(self.identity))), None)
        if isinstance(message, Fenced) and len(self.world.coordinator_names) > 1:
            self.world.counts["fenced by one of several"] += 1
        self.inbox.append(message)
        self.network.woken(self)


class VirtualListener:
    """The listening end."""

    def __init__(self, network: VirtualNetwork, address: str, allowed: frozenset[type[Message]]) -> None:
        self.network, self.world, self.address, self._allowed = network, network.world, address, allowed
        self.number = self.world.next_number()
        self.inbox: list[tuple[bytes, Message]] = []
        self.closed = False
        self.on_the_way: Counter[bytes] = Counter()  # messages to it, by sender, where the network loses none
        self._routes: dict[bytes, VirtualChannel] = {}  # the newest of each identity
        self._opened_to = dict[PeerId, int]()  # by peer: the newest of ours it opened a channel to

    @property
    def socket(self) -> object:
        return self

    def send(self, peer: bytes, *messages: Message) -> bool:
        """False: no connection of this identity is there."""
        channel, process = self._routes.get(peer), self.network.owner
        if channel is None or channel.closed or not channel.network.owner.alive or not process.alive:
            return False
        self._check_way_back(
            peer, messages
        )  # the channels of a dead peer are forgotten, late messages answered
        if process.frozen:
            process.run(self._send, channel, messages)
        else:
            self._send(channel, messages)
        return True

    def _send(self, channel: VirtualChannel, messages: Sequence[Message]) -> None:
        for message in messages:
            self.world.network.send(
                self.network.name, channel.network.name, message, channel.come, self.number
            )

    def _check_way_back(self, identity: bytes, messages: Sequence[Message]) -> None:
        """If a peer has two channels, answers go to the one that was opened to the later incarnation."""
        if (peer := worker_of(identity)) is None:
            return
        if is_earlier(opened_to(identity), self._opened_to.get(peer, 0)):
            self.world.violated(
                f"{self.network.name}: answers {peer[0]} on a channel to incarnation {opened_to(identity)}"
            )
        if any(
            isinstance(message, Retired) and has_ended(peer[1], message.incarnation) for message in messages
        ):
            self._opened_to.pop(peer, None)  # nothing more comes from it

    def receive(self, limit: int) -> list[tuple[bytes, Message]]:
        messages, self.inbox = self.inbox, []
        self.network.readable.discard(self)
        return messages

    def come(self, channel: VirtualChannel, message: Message) -> None:
        self.network.owner.run(self.arrive, channel, message)

    def arrive(self, channel: VirtualChannel, message: Message) -> None:
        if self.closed:
            return
        if type(message) not in self._allowed and type(message) is not OtherVersion:
            self.world.violated(
                f"{self.network.name}: got a {type(message).__name__} from {channel.network.name}"
            )
        known = self._routes.get(channel.identity)
        if known is None or channel.number >= known.number:
            self._routes[channel.identity] = channel
        peer, addressee = worker_of(channel.identity), opened_to(channel.identity)
        if peer is not None and not is_earlier(addressee, self._opened_to.get(peer, 0)):
            self._opened_to[peer] = addressee
        self.inbox.append((channel.identity, message))
        self.network.woken(self)
