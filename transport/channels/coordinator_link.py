"""A worker's line to the coordinator: says hello until it is welcome, and again under a new incarnation when
it is fenced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from ..environment import Channel, Network
from ..messages.fields import WIRE_VERSION
from ..messages.messages import FROM_COORDINATOR, Alive, Fenced, Hello, Message, Welcome

HELLO_EVERY_S = 1.0
ORPHANED_AFTER_S = 10.0  # the coordinator answers every heartbeat
COMPLAIN_AFTER_S = 4.0  # then after twice as long, and so on
RECEIVE_LIMIT = 256
_log = logging.getLogger(__name__)


class LinkedWorker(Protocol):
    """What the link, or all links, ask of the worker behind them."""

    def hello(self, incarnation: int) -> Hello:
        """How the worker introduces itself."""

    def welcomed(self, coordinator: int) -> None:
        """This coordinator incarnation's work counts from now on; that of an earlier one behind the same link
        does not."""

    def fenced(self, incarnation: int) -> None:
        """All work is void; the worker goes on under a new incarnation."""

    def orphaned(self) -> None:
        """This link's coordinator has not been heard of for long, or does not know the worker: nobody owns
        what it had asked for."""


class LinkOwner(LinkedWorker, Protocol):
    """The owner of several links."""

    @property
    def alone(self) -> bool:
        """Whether there is but one coordinator."""

    def told_of(self, addresses: Sequence[str]) -> None:
        """Where other coordinators listen."""


def identity_of(worker_id: str, incarnation: int, *more: int) -> bytes:
    """A socket identity that names a worker's incarnation."""
    return "\0".join([worker_id, *(f"{n:x}" for n in (incarnation, *more))]).encode()


def worker_of(identity: bytes) -> tuple[str, int] | None:
    """The worker id and incarnation in a socket identity; None where it names none."""
    try:
        worker_id, incarnation, *_ = identity.decode().split("\0")
        return worker_id, int(incarnation, 16)
    except ValueError:
        return None


def opened_to(identity: bytes) -> int:
    """The incarnation of the addressee that a peer's socket identity names; 0 where it names none."""
    try:
        return int(identity.decode().split("\0")[2], 16)
    except (ValueError, IndexError):
        return 0


class CoordinatorLink:
    """One channel, made anew with each incarnation. ``incarnations`` gives a new one's number."""

    def __init__(
        self,
        address: str,
        network: Network,
        worker_id: str,
        worker: LinkOwner,
        incarnations: Callable[[], int],
        orphaned_after_s: float = ORPHANED_AFTER_S,
        incarnation: int | None = None,
    ) -> None:
        """``incarnation``: where the worker has one already."""
        self._address, self._network, self._worker_id = address, network, worker_id
        self._worker, self._incarnations, self._orphaned_after_s = worker, incarnations, orphaned_after_s
        self._heard = 0.0  # when the coordinator last spoke
        self.incarnation = incarnations() if incarnation is None else incarnation
        self.coordinator: int | None = None  # the coordinator's incarnation, once it has welcomed us
        self.heartbeat_s = 0.25
        self._misfit = ""
        self._said_hello = float("-inf")
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
        """What the coordinator has said, but for what concerns the link itself."""
        messages = []
        for message in self._channel.receive(RECEIVE_LIMIT):
            self._heard = now
            if isinstance(message, Welcome):
                self._welcome(message)
            elif isinstance(message, Fenced):
                self._fence(message)
                return []
            elif isinstance(message, Alive):
                self._note_misfit(message.misfit)
            else:
                messages.append(message)
        return messages

    def tick(self, now: float) -> None:
        """Says hello again where it was not answered."""
        self._complain(now)
        if self.coordinator is not None and now - self._heard >= self._orphaned_after_s:
            silent_s = now - self._heard
            _log.warning(
                "no word from the coordinator at %s for %.0f s: freeing all it had asked for",
                self._address,
                silent_s,
            )
            self.coordinator, self._said_hello = None, float("-inf")
            self._worker.orphaned()
        if self.coordinator is None and now - self._said_hello >= HELLO_EVERY_S:
            self._said_hello = now
            self.send(self._worker.hello(self.incarnation))

    def _note_misfit(self, misfit: str) -> None:
        """Logs each change: a worker that gets no work looks healthy otherwise."""
        if misfit != self._misfit:
            self._misfit = misfit
            level = logging.WARNING if misfit else logging.INFO
            _log.log(level, "%s", misfit or "there is a worker of the other role that this one fits")

    def _complain(self, now: float) -> None:
        """Says, less and less often, that nobody answers: a wrong key shows in no other way."""
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
        """``linger_s``: how long what was sent last may take to leave."""
        self._network.close(self._channel, linger_s)

    def _connect(self) -> Channel:
        identity = identity_of(self._worker_id, self.incarnation)
        return self._network.connect(self._address, identity, FROM_COORDINATOR)

    def _welcome(self, message: Welcome) -> None:
        if self.coordinator != message.coordinator:
            _log.info("connected to the coordinator at %s", self._address)
        self.coordinator, self.heartbeat_s = message.coordinator, message.heartbeat_s
        self._worker.welcomed(message.coordinator)
        self._worker.told_of([_with_host_of(self._address, other) for other in message.others])

    def _fence(self, message: Fenced) -> None:
        if not self._worker.alone:
            _log.warning(
                "fenced by the coordinator at %s (%s): dropping its work", self._address, message.reason
            )
            self.coordinator, self._said_hello = None, float("-inf")
            self._worker.orphaned()
            return
        _log.warning(
            "fenced by the coordinator (%s): dropping all work, starting over as a new incarnation",
            message.reason,
        )
        self.close()
        self.incarnation = self._incarnations()
        self.coordinator, self._said_hello = None, float("-inf")
        self._channel = self._connect()
        self._worker.fenced(self.incarnation)


def _with_host_of(known: str, told: str) -> str:
    """An address where a coordinator listens, as this worker reaches it: 0.0.0.0 means the host of the one
    that said so."""
    host, _, port = told.removeprefix("tcp://").rpartition(":")
    return f"{known.rpartition(':')[0]}:{port}" if host in ("0.0.0.0", "*", "[::]") else told
