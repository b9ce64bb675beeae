"""Messages between processes, as badly carried as the adversary likes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from splitserve.transport.errors import BadMessage
from splitserve.transport.messages.codec import decode, encode
from splitserve.transport.messages.messages import Message

if TYPE_CHECKING:
    from simulation.world import World

LATE_S = 1.0
ENCODED = 0.1
"""This share of all messages really goes through the codec: a core's messages must be valid on the wire."""


class Network:
    """Between processes named by ``source`` and ``target``. A partition swallows what it stops, or holds it
    back until it heals."""

    def __init__(self, world: World) -> None:
        self.world, self.random, self.queue = world, world.random, world.queue
        self.faults, self.counts = world.scenario.faults, world.counts
        self.sent: Counter[str] = Counter()  # messages by type
        self._cuts: dict[
            tuple[str, str], tuple[float, bool]
        ] = {}  # until when, and whether messages are held back
        self._cut_since: dict[tuple[str, str], float] = {}
        self._newest: dict[tuple[str, str], float] = {}  # when the latest of one's messages to another comes
        self.held_until = 0.0  # when the last comes that a partition has held back

    def cut(self, source: str, target: str, seconds: float, holds: bool) -> None:
        """From now on nothing passes from ``source`` to ``target``."""
        if self._cuts.get((source, target), (0.0, False))[0] <= self.queue.now:
            self._cut_since[(source, target)] = self.queue.now
        self._cuts[(source, target)] = (self.queue.now + seconds, holds)

    def is_cut(self, one: str, other: str, seconds: float) -> bool:
        """Whether one way or both have been cut for ``seconds``."""
        now = self.queue.now
        return any(
            self._cuts.get(way, (0.0, False))[0] > now and now - self._cut_since[way] >= seconds
            for way in ((one, other), (other, one))
        )

    def heal(self) -> None:
        self._cuts.clear()

    def send(
        self, source: str, target: str, message: Message, receive: Callable[..., None], *args: Any
    ) -> None:
        """Calls ``receive(*args, message)`` some time later; perhaps never, perhaps twice."""
        random, faults = self.random.random, self.faults
        self.sent[message.__class__.__name__] += 1
        if random() < ENCODED:
            message = decode(encode(message), (type(message),))
        if (arriving := self.world.builds.across(source, target, message)) is None:
            return
        message = arriving
        delay = 0.0002 + 0.0008 * random()
        if not self.world.calm:
            if self._cuts and (delay := self._held(source, target, delay)) < 0:
                return
            if faults.drop and random() < faults.drop:
                self.counts["messages dropped"] += 1
                return
            if faults.mangle and random() < faults.mangle:
                self.counts["messages mangled"] += 1
                self._mangle(message)
                return
            if faults.late and random() < faults.late:
                self.counts["messages late"] += 1
                delay = 0.01 + LATE_S * random()
            if faults.double and random() < faults.double:
                self.counts["messages doubled"] += 1
                self.queue.after(delay + LATE_S * random() ** 4, receive, *args, message)
        self.queue.at(self._arrival(source, target, delay), receive, *args, message)

    def _mangle(self, message: Message) -> None:
        """Its bytes are changed or cut: the real codec refuses them, or makes a message of them, which the
        cipher would have refused. It must raise BadMessage and nothing else."""
        data = bytearray(encode(message))
        if self.random.random() < 0.3:
            del data[int(self.random.random() * len(data)) :]
        for _ in range(1 + int(3 * self.random.random()) if data else 0):
            data[int(self.random.random() * len(data))] ^= 1 + int(255 * self.random.random())
        try:
            decode(bytes(data), (type(message),))
        except BadMessage:
            self.counts["mangled messages refused by the codec"] += 1
        else:
            self.counts["mangled messages left to the cipher"] += 1

    def _arrival(self, source: str, target: str, delay: float) -> float:
        """One connection's messages come in order. Only the adversary changes that, where it makes messages
        late."""
        at = self.queue.now + delay
        if not self.faults.late or self.world.calm:
            at = self._newest[(source, target)] = max(at, self._newest.get((source, target), 0.0))
        return at

    def _held(self, source: str, target: str, delay: float) -> float:
        """The delay through a partition, if there is one here; negative: what is sent is lost."""
        until, holds = self._cuts.get((source, target), (0.0, False))
        left = until - self.queue.now
        if left <= 0:
            return delay
        self.counts["messages held by a partition" if holds else "messages lost in a partition"] += 1
        if not holds:
            return -1.0
        self.held_until = max(self.held_until, until + delay)
        return left + delay
