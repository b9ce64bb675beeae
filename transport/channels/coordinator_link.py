"""A worker's connection to the coordinator: sends Hello until Welcome, again under a new incarnation when it
is fenced, and in the end Goodbye until it is fenced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from ..environment import Channel, Network
from ..messages.fields import WIRE_VERSION
from ..messages.messages import (
    FROM_COORDINATOR,
    Alive,
    Fenced,
    Goodbye,
    Hello,
    Message,
    OtherVersion,
    Welcome,
)
from ..process.host import EVERYWHERE

HELLO_EVERY_S, GOODBYE_EVERY_S = 1.0, 0.1
HEARTBEAT_S = 0.25  # until a coordinator names another time
COMPLAIN_AFTER_S = 4.0  # then after twice as long, and so on
RECEIVE_LIMIT = 256
_log = logging.getLogger(__name__)


class LinkedWorker(Protocol):
    """The worker, as its links use it."""

    def hello(self, incarnation: int) -> Hello:
        """Return the worker's introduction."""

    def welcomed(self, coordinator: int) -> None:
        """Accept this coordinator incarnation's work from now on, and drop that of an earlier one behind the
        same link."""

    def fenced(self, incarnation: int) -> None:
        """Drop all work, and go on under a new incarnation."""

    def orphaned(self) -> None:
        """Drop the work of this link's coordinator: it has been silent for long, or does not know the
        worker."""


class LinkOwner(LinkedWorker, Protocol):
    """The owner of several links."""

    @property
    def alone(self) -> bool:
        """Whether there is one coordinator only."""

    def learn_addresses(self, addresses: Sequence[str]) -> None:
        """Connect to other coordinators, at these addresses."""


@lru_cache(maxsize=4096)
def identity_of(worker_id: str, incarnation: int, *more: int) -> bytes:
    """Return a socket identity that names a worker's incarnation."""
    return "\0".join([worker_id, *(f"{n:x}" for n in (incarnation, *more))]).encode()


@lru_cache(maxsize=4096)
def worker_of(identity: bytes) -> tuple[str, int] | None:
    """Return the worker id and incarnation in a socket identity; None where it names none."""
    try:
        worker_id, incarnation, *_ = identity.decode().split("\0")
        return worker_id, int(incarnation, 16)
    except ValueError:
        return None


def opened_to(identity: bytes) -> int:
    """Return the incarnation of the addressee that a peer's socket identity names; 0 where it names none."""
    try:
        return int(identity.decode().split("\0")[2], 16)
    except (ValueError, IndexError):
        return 0


class CoordinatorLink:
    """One channel, made anew with each incarnation. ``incarnations`` returns the next one's number."""

    def __init__(
        self,
        address: str,
        network: Network,
        worker_id: str,
        worker: LinkOwner,
        incarnation: int,
        incarnations: Callable[[], int],
        orphaned_after_s: float,
    ) -> None:
        self._address, self._network, self._worker_id = address, network, worker_id
        self._worker, self._incarnations, self._orphaned_after_s = worker, incarnations, orphaned_after_s
        self._received_at = 0.0  # when the last message came
        self.incarnation = incarnation
        self.coordinator: int | None = None  # the coordinator's incarnation, once it has welcomed us
        self.heartbeat_s = HEARTBEAT_S
        self.misfit = ""
        """Why no worker of the other role fits this one, as the coordinator has put it; empty: one does."""
        self._hello_at = self._goodbye_at = float("-inf")
        self._leaves = False
        self.has_left = False
        """It has left in good order, and the coordinator knows."""
        self._waiting_since: float | None = None
        self._complain_after_s = COMPLAIN_AFTER_S
        self._channel = self._connect()

    @property
    def socket(self) -> object:
        """Names the channel among those that are ready; changes with the incarnation."""
        return self._channel.socket

    def send(self, *messages: Message) -> bool:
        """Queues messages, together; False where any had to be dropped."""
        return self._channel.send(*messages)

    def receive(self, now: float) -> list[Message]:
        """Return the coordinator's messages, without those about the link itself."""
        messages = []
        for message in self._channel.receive(RECEIVE_LIMIT):
            self._received_at = now
            if self._leaves:
                self.has_left = self.has_left or isinstance(message, Fenced)
                continue
            if isinstance(message, Welcome):
                self._welcome(message)
            elif isinstance(message, Fenced):
                self._fence(message)
                return []
            elif isinstance(message, Alive):
                self._waiting_since = None
                self._note_misfit(message.misfit)
            elif isinstance(message, OtherVersion):
                self._waiting_since = None  # it has answered, and the channel has logged why it does not work
            else:
                messages.append(message)
        return messages

    def leave(self, now: float) -> None:
        """Receive and send nothing any more but Goodbye, until it is answered: one that is sent while the
        connection ends is lost, and a worker that ends without one seems to have died."""
        self._send_goodbye(now)  # also where Hello is still to be answered: Welcome may be on the way
        self._leaves, self.has_left, self.coordinator = True, self.coordinator is None, None

    def tick(self, now: float) -> None:
        """Send Hello or Goodbye again where it was not answered."""
        if self._leaves:
            self._send_goodbye(now)
            return
        self._complain(now)
        self._channel.gone_since(now)  # reads the connection's events: a full queue stops ZeroMQ's thread
        if self.coordinator is not None and now - self._received_at >= self._orphaned_after_s:
            silent = "no message from the coordinator at %s for %.0f s: freeing all it had asked for"
            _log.warning(silent, self._address, now - self._received_at)
            self.coordinator, self._hello_at = None, float("-inf")
            self._worker.orphaned()
        if self.coordinator is None and now - self._hello_at >= HELLO_EVERY_S:
            self._hello_at = now
            self.send(self._worker.hello(self.incarnation))

    def _send_goodbye(self, now: float) -> None:
        if not self.has_left and now - self._goodbye_at >= GOODBYE_EVERY_S:
            self._goodbye_at = now
            self.send(Goodbye(worker_id=self._worker_id, incarnation=self.incarnation))

    def _note_misfit(self, misfit: str) -> None:
        """Log each change: a worker that gets no work looks healthy otherwise."""
        if misfit != self.misfit:
            self.misfit = misfit
            level = logging.WARNING if misfit else logging.INFO
            _log.log(level, "%s", misfit or "there is a worker of the other role that this one fits")

    def _complain(self, now: float) -> None:
        """Log, less and less often, that there is no answer: a wrong key shows in no other way."""
        if self.coordinator is not None:
            self._waiting_since, self._complain_after_s = None, COMPLAIN_AFTER_S
            return
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since >= self._complain_after_s:
            self._complain_after_s *= 2
            _log.warning(
                "no answer from the coordinator at %s for %.0f s: does it run, is the port open, has it the "
                "same key file, and wire version %d (`splitserve version`)?",
                self._address,
                now - self._waiting_since,
                WIRE_VERSION,
            )

    def close(self, linger_s: float = 0.0) -> None:
        """End the channel. ``linger_s``: how long the last messages may take to leave."""
        self._network.close(self._channel, linger_s)

    def _connect(self) -> Channel:
        identity = identity_of(self._worker_id, self.incarnation)
        return self._network.connect(self._address, identity, FROM_COORDINATOR)

    def _welcome(self, message: Welcome) -> None:
        if self.coordinator != message.coordinator:
            _log.info("connected to the coordinator at %s", self._address)
        self.coordinator, self.heartbeat_s = message.coordinator, message.heartbeat_s
        self._worker.welcomed(message.coordinator)
        self._worker.learn_addresses([_with_host_of(self._address, other) for other in message.others])

    def _fence(self, message: Fenced) -> None:
        if not self._worker.alone:
            _log.warning(
                "cut off by the coordinator at %s (%s): dropping its work", self._address, message.reason
            )
            self.coordinator, self._hello_at = None, float("-inf")
            self._worker.orphaned()
            return
        _log.warning("cut off by the coordinator (%s): dropping all work, registering anew", message.reason)
        self.close()
        self.incarnation = self._incarnations()
        self.coordinator, self._hello_at = None, float("-inf")
        self._channel = self._connect()
        self._worker.fenced(self.incarnation)


def _with_host_of(known: str, other: str) -> str:
    """Return the address of another coordinator, as this worker reaches it: 0.0.0.0 means the host of the one
    that sent it."""
    host, _, port = other.removeprefix("tcp://").rpartition(":")
    return f"{known.rpartition(':')[0]}:{port}" if host in EVERYWHERE else other
