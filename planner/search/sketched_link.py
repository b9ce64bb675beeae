"""What links one sketched worker to others: meetings, puts, checks of the blocks that come, and grants."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from ...transport.handoff.layer_slicing import SETTLED_BYTES, seen
from ...transport.handoff.protocol import HandoffTimes
from ..simulator.events import Event
from .sketched_request import Asked, Place

TIMES = HandoffTimes()


@dataclass(slots=True, eq=False)
class Contact:
    """A worker that blocks go to. A burst of puts lasts until none is under way."""

    place: Place
    is_tested: bool = False
    waiting: list[Asked] = field(default_factory=list)  # for that test
    rate: float | None = None
    renewed_at: float = -inf
    burst_bytes: int = 0
    since: float = 0.0
    until: float = 0.0

    def settle(self) -> bool:
        """The burst has ended: time it. Return whether that changes the rate."""
        num_bytes, self.burst_bytes = self.burst_bytes, 0
        if num_bytes < SETTLED_BYTES:
            return False
        self.rate = seen(self.rate, num_bytes, self.until - self.since)
        return True


class SketchLink:
    """It sends one put at a time and receives one at a time."""

    def __init__(self, worker: Place) -> None:
        self._worker, self._events, self._times = worker, worker.events, worker.times
        self._contacts: dict[int, Contact] = {}
        self._free_at = 0.0  # for more puts

    def offer(self, request: Asked) -> Contact:
        """Offer a prompt to its place, which is met before."""
        place = request.place
        if (contact := self._contacts.get(place.number)) is None:
            contact = self._contacts[place.number] = Contact(place)
            self._events.after(self._times.message_s, self._meet, contact, 3)
        if contact.is_tested:
            self._events.after(self._times.message_s, place.offered, request)
        else:
            contact.waiting.append(request)
        return contact

    def _meet(self, contact: Contact, left: int) -> None:
        """One of the messages before the test has come, of which ``left`` follow."""
        if left in (3, 1):
            contact.place.test(left == 1)
        if left == 2:
            self._worker.blocks.num_free -= 1  # is written for the test
            if self._worker.free_blocks(self._events.now) < 1:
                self._worker.coordinator.is_exact = False
        if left:
            self._events.after(self._times.message_s, self._meet, contact, left - 1)
        else:
            num_bytes = self._times.memory.block_bytes
            done = self.transfer(contact.place, num_bytes, 0) if contact.place is not self._worker else 0.0
            self._events.at(done, self.check, contact.place, 1, self._passed, contact)

    def _passed(self, contact: Contact) -> None:
        contact.place.test(-1)
        self._events.after(self._times.message_s, self._tested, contact)

    def _tested(self, contact: Contact) -> None:
        contact.is_tested = True
        self._worker.blocks.num_free += 1
        for request in contact.waiting:
            self.offer(request)
        contact.waiting.clear()

    def transfer(self, place: Place, num_bytes: int, num_slices: int) -> float:
        """Put blocks, of which this number is of some layers only. Return when they have arrived."""
        begin, times = self._events.now, self._times
        bytes_per_s = min(times.bytes_per_s, place.times.bytes_per_s)
        seconds = times.put_s + num_slices * times.slice_s + num_bytes / bytes_per_s
        if begin < self._free_at:
            begin = self._free_at
        self._free_at = begin + seconds
        received_at = place.received_at
        place.received_at = received_at = (begin if begin > received_at else received_at) + seconds
        if received_at > self._events.now + TIMES.test:
            self._worker.coordinator.is_exact = False
        return received_at

    def check(self, place: Place, num_blocks: int, then: Event, *args: object) -> None:
        """Name the checksums of blocks to their receiver. ``then``: it has checked them."""
        times = place.times
        arrives = self._events.now + self._times.message_s
        place.checked_at = max(arrives, place.checked_at) + times.check_s(num_blocks)
        self._events.at(place.checked_at + times.handoff.join_s, then, *args)


class Grants:
    """The prompts that are offered to ``worker``: they get blocks, in their order, once there is room."""

    def __init__(self, worker: Place) -> None:
        self._worker, self._events = worker, worker.events
        self._offers: list[Asked] = []
        self.num_granted = 0  # sequences that have not joined

    @property
    def is_active(self) -> bool:
        return bool(self._offers or self.num_granted)

    def test(self, num_blocks: int) -> None:
        """A worker that is met tests the way here with a block, and gives it back."""
        self._worker.blocks.num_free -= num_blocks
        self._worker.activate()
        self._worker.turn()

    def offered(self, request: Asked) -> None:
        self._worker.activate()
        self._offers.append(request)
        self.grant_waiting()
        self._worker.turn()

    def grant_waiting(self) -> None:
        worker, offers = self._worker, self._offers
        while offers:
            num_travelling = self._num_travelling(offers[0])
            num_rows, num_free = worker.num_rows, worker.free_blocks(self._events.now)
            if (
                num_rows + self.num_granted >= worker.times.max_num_seqs
                or num_travelling + num_rows > num_free
            ):
                return
            request = offers.pop(0)
            if self._events.now > request.since + TIMES.grant:
                worker.coordinator.is_exact = False
            request.num_kept = worker.blocks.num_for(request.num_tokens) - num_travelling
            self.num_granted += 1
            worker.blocks.num_free -= num_travelling
            worker.shorten()
            self._events.after(worker.times.message_s, request.source.granted, request)

    def _num_travelling(self, request: Asked) -> int:
        """Its blocks that are not here: of a prompt that is computed here, a last one that is not full."""
        blocks = self._worker.blocks
        kept = request.num_tokens // blocks.size if request.source is self._worker else 0
        return blocks.num_for(request.num_tokens) - kept

    def joins(self, request: Asked) -> None:
        """All its blocks are here."""
        self.num_granted -= 1
        num_left = self._worker.blocks.num_for(request.num_tokens) - request.num_kept
        self._events.after(self._worker.times.message_s, self._joined, request, num_left)
        self._worker.join(request)

    def _joined(self, request: Asked, num_left: int) -> None:
        """The messages of that have come."""
        request.source.handed_over(request, num_left)
        self._worker.coordinator.joined(request)
