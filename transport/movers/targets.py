"""All mover targets of a decode worker as one: leases are opened and closed on each; and when a writer's puts
can land no more.

The receiving core frees blocks as soon as it learns that a writer has ended, has another name, or was shut
out. By most movers nothing is written after that. By one that *lingers* (``nixl``) a put that has begun is on
its way in a network, and lands whatever happens to the writer, until the target has ended the agent that it
comes in by. So the core learns of such ends only after that (``WaysIn``)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from msgspec.structs import replace

from ..messages.fields import has_ended, is_earlier, same_process
from ..messages.messages import Meet, Message, Met, PeerId, Retire
from .interface import Arrival, MoverEndpoints, PutTarget, as_talking_target

_log = logging.getLogger(__name__)


class MoverTargets:
    """``targets``: by mover; ``endpoints``: their addresses for peers; ``log``: see ``WaysIn``."""

    def __init__(
        self,
        targets: Mapping[str, PutTarget],
        endpoints: MoverEndpoints,
        log: Callable[[str], None] = _log.warning,
    ) -> None:
        self._targets, self.endpoints = targets, endpoints
        talking = map(as_talking_target, targets.values())
        self._talking = [target for target in talking if target is not None]
        self.ways_in = WaysIn(targets, log)

    @property
    def fds(self) -> list[int]:
        """Descriptors to be polled for reading."""
        return [target.fd for target in self._targets.values() if target.fd is not None]

    def complete(self, met: Met, peer: PeerId) -> Met | None:
        """Return ``met`` with the address of this peer's mover. None: not ready, the peer will ask again."""
        if met.refused or not met.mover:
            return met
        address = self._targets[met.mover].address(peer)
        if address is None:
            return None
        self.ways_in.met(peer, met.mover)
        return replace(met, mover_address=address)

    def open(self, lease: int, secret: bytes, positions: Mapping[int, int]) -> None:
        for target in self._targets.values():
            target.open(lease, secret, positions)

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        for target in self._targets.values():
            target.expect_again(lease, positions)

    def close(self, lease: int) -> None:
        for target in self._targets.values():
            target.close(lease)

    def receive(self, peer: PeerId, message: Message) -> None:
        """Take one of BETWEEN_MOVERS."""
        for target in self._talking:
            target.receive(peer, message)

    def take_messages(self) -> list[tuple[PeerId, Message]]:
        """Return the movers' messages to their other ends."""
        return [message for target in self._talking for message in target.take_messages()]

    def poll(self, ready: AbstractSet[object], limit: int) -> list[Arrival]:
        """Return arrivals of movers whose descriptor is among ``ready``, up to ``limit`` blocks each."""
        if not ready:
            return []
        return [
            arrival
            for target in self._targets.values()
            if target.fd in ready
            for arrival in target.poll(limit)
        ]

    def close_all(self) -> None:
        for target in self._targets.values():
            target.close_all()


class Receiver(Protocol):
    """A HandoffReceiver, as it is used here."""

    def writers(self) -> dict[PeerId, int]: ...
    def writer_gone(self, peer: PeerId) -> None: ...
    def writer_shut_out(self, peer: PeerId) -> None: ...
    def silent_writers(self, now: float) -> set[PeerId]: ...


class WaysIn:
    """Which movers each writer writes by. Pure, except that it calls the targets. ``log`` takes a sentence
    about each writer that is shut out."""

    def __init__(self, targets: Mapping[str, PutTarget], log: Callable[[str], None]) -> None:
        self._targets, self._log = targets, log
        self._met_by: dict[PeerId, set[str]] = {}
        self._leaving: set[PeerId] = set()  # ``shut_out`` has to be called again
        # Writers by a mover that lingers. One that has been shut out may not know it, and be granted leases
        # still: it fails at its next put, and does not release that lease.
        self._lingered: set[PeerId] = set()

    def met(self, peer: PeerId, mover: str) -> None:
        """Note that the peer may write by this mover from now on."""
        self._met_by.setdefault(peer, set()).add(mover)
        if self._targets[mover].lingers:
            self._lingered.add(peer)

    def may_meet(self, peer: PeerId, meet: Meet, here: bool, receiver: Receiver) -> bool:
        """Return whether Meet may go to the core: not while a put that was begun under an earlier name of the
        same process, or by a mover that has failed since, may still land. It will be sent again. ``here``:
        the writer is on this host."""
        for earlier in self._earlier(peer):
            if same_process(earlier[1], peer[1]):
                if not self._is_over(earlier):
                    return False
                self.forget(earlier)  # as the core does with this Meet
            elif not here:  # it has been started anew: its earlier puts need not be waited for
                self._shut_out(earlier, receiver)
        if meet.failed and peer in self._lingered:
            if not self._is_over(peer):
                return False
            receiver.writer_shut_out(peer)
        return True

    def may_retire(self, peer: PeerId, retire: Retire, receiver: Receiver) -> bool:
        """Return whether Retire may go to the core; if not, it will be sent again."""
        ended = [e for e in receiver.writers() if e[0] == peer[0] and has_ended(e[1], retire.incarnation)]
        return not [e for e in ended if not self._is_over(e)]  # a list: each is shut out

    def process_ended(self, peer: PeerId, receiver: Receiver) -> bool:
        """Report to the core that the writer's process has ended. Return False if that has to wait: call it
        again."""
        if not self._is_over(peer):
            return False
        receiver.writer_gone(peer)
        self.forget(peer)
        return True

    def look(self, here: Container[PeerId], receiver: Receiver, now: float) -> None:
        """Shut out writers that have not answered for long. ``here``: those of this host, which end with
        their process, unless their puts outlive it anyway."""
        for peer in receiver.silent_writers(now) | self._leaving:
            if peer not in here:
                self._shut_out(peer, receiver)
            elif peer in self._lingered and self._is_over(peer):
                self._report_shut_out(peer, receiver)

    def forget(self, peer: PeerId) -> None:
        """Forget the writer: it writes no more."""
        for mover in self._met_by.pop(peer, ()):
            self._targets[mover].shut_out(peer)
        self._leaving.discard(peer)
        self._lingered.discard(peer)

    def _shut_out(self, peer: PeerId, receiver: Receiver) -> None:
        still = [mover for mover in self._met_by.get(peer, ()) if not self._targets[mover].shut_out(peer)]
        if still:
            self._leaving.add(peer)
            return
        self._met_by.pop(peer, None)
        self._leaving.discard(peer)
        self._report_shut_out(peer, receiver)

    def _is_over(self, peer: PeerId) -> bool:
        """Return whether no put that it has begun lands any more."""
        movers = self._met_by.get(peer, set())
        movers -= {
            mover for mover in movers if self._targets[mover].lingers and self._targets[mover].shut_out(peer)
        }
        if not movers:
            self._met_by.pop(peer, None)
        return not any(self._targets[mover].lingers for mover in movers)

    def _earlier(self, peer: PeerId) -> list[PeerId]:
        """Return earlier incarnations of this worker that may be writing. One of another process counts if it
        was met before this one."""
        before = itertools.takewhile(lambda known: known != peer, self._met_by)
        other_processes = [p for p in before if p[0] == peer[0] and not same_process(p[1], peer[1])]
        own = [p for p in self._met_by if p[0] == peer[0] and is_earlier(p[1], peer[1])]
        return [
            p
            for p in (*own, *other_processes)
            if any(self._targets[mover].one_sided for mover in self._met_by[p])
        ]

    def _report_shut_out(self, peer: PeerId, receiver: Receiver) -> None:
        self._log(
            f"{peer[0]} can write no more KV blocks here: it has not answered, or has been started anew"
        )
        receiver.writer_shut_out(peer)
