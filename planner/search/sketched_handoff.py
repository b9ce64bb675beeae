"""The handoffs of one sketched worker: when its prompts' KV blocks leave and arrive, put by put, as
``transport/handoff`` decides it, with the times of its messages and of the first meeting's self-test."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...transport.handoff.layer_slicing import UNSEEN_RATE
from ...transport.handoff.protocol import HandoffTimes
from .sketched_link import Contact, SketchLink
from .sketched_request import Asked, Place

RENEW_S, RESEND_S = HandoffTimes().lease / 3, HandoffTimes().resend


@dataclass(slots=True, eq=False)
class Handoff:
    """A prompt on its way. Numbers of blocks count from its first."""

    request: Asked
    contact: Contact
    num_blocks: int
    sent_at: float  # its offer
    is_granted: bool = False
    is_computed: bool = False
    num_ready: int = 0  # blocks that are final
    num_put: int = 0
    num_placed: int = 0  # that were named
    stop: int = 0  # blocks that are final after the running step
    filling: int = 0  # blocks of which some layers are final
    layers_ready: int = 0  # these layers
    layers_put: int = 0
    slice: int = 0  # layers in a put
    slice_blocks: int = 0  # of this number of blocks
    slice_rate: float = 0.0  # at this rate
    written_at: float = 0.0  # all its puts have ended
    held_back: list[tuple[int, bool]] = field(default_factory=list)  # until then

    def blocks_final(self, left: int) -> int:
        """Blocks that are final when this number of tokens is left to compute."""
        request = self.request
        return (request.num_tokens - left) // request.place.blocks.size if left else self.num_blocks


class Handoffs:
    """Those of the prompts that ``worker`` computes."""

    def __init__(self, worker: Place) -> None:
        self._worker, self._events, self._times = worker, worker.events, worker.times
        self._link = SketchLink(worker)
        self._num_layers = worker.times.memory.num_layers
        self.open: dict[Asked, Handoff] = {}
        self._filling: list[Handoff] = []  # in the running step with prompts
        self._step = 0  # number of that
        self._begun_at = self._seconds = 0.0
        self._stride = 0  # layers between two looks; 0: there is none
        self._awaited = 0  # layers at the next look
        self._is_overdue = False  # more are final than leave
        self._ending: list[Handoff] | None = None  # those that put at this look
        self._ahead: tuple[Handoff, float | None, int]  # whose rate was taken, with rate and burst before
        self._ahead_until = 0.0  # its put ends

    # --- messages --------------------------------------------------------------------------------

    def begin(self, request: Asked) -> None:
        """Offer it to its place."""
        num_blocks = self._worker.blocks.num_for(request.num_tokens)
        contact = self._link.offer(request)
        self.open[request] = Handoff(request, contact, num_blocks, self._events.now)
        self._worker.activate()

    def granted(self, request: Asked) -> None:
        """The grant has come here."""
        handoff = self.open[request]
        if self._events.now < self._ahead_until:
            self._settle_later()
        self._note_layers(self._num_done())
        handoff.is_granted = True
        handoff.num_put = handoff.num_placed = request.num_kept
        self._put_due(handoff)
        if handoff.is_computed:
            self._announce(handoff, handoff.num_blocks - request.num_kept, True)
        else:
            self._name_put(handoff)
        self._await_layers()

    def tick(self) -> None:
        """Renew leases, repeat offers: messages, by which their workers turn."""
        now, message_s = self._events.now, self._times.message_s
        for handoff in self.open.values():
            contact = handoff.contact
            if handoff.is_granted and now - contact.renewed_at >= RENEW_S:
                contact.renewed_at = now
                self._events.after(message_s, contact.place.turn)
            elif not handoff.is_granted and contact.is_tested and now - handoff.sent_at >= RESEND_S:
                handoff.sent_at = now
                self._events.after(message_s, contact.place.turn)

    # --- steps -----------------------------------------------------------------------------------

    def step_begins(self, chunks: list[tuple[Asked, int]], seconds: float) -> None:
        """A step of these prompts, each with its number of tokens, begins now."""
        self._filling = filling = []
        stride = num_layers = self._num_layers
        for request, count in chunks if self.open else ():
            if (handoff := self.open.get(request)) is not None:
                handoff.stop = handoff.blocks_final(request.left - count)
                filling.append(handoff)
                if (num := handoff.stop - max(handoff.num_put, handoff.num_ready)) > 0:
                    stride = min(stride, self._slice(handoff, num))
        self._stride = stride if stride < num_layers else 0
        self._begun_at, self._seconds = self._events.now + self._times.prefill_loop_s, seconds
        self._awaited = 0
        self._step += 1
        self._await_layers()

    def chunk_done(self, request: Asked) -> None:
        """One of its chunks has been computed."""
        self._stride = 0
        if (handoff := self.open.get(request)) is None:
            return
        handoff.layers_ready, handoff.is_computed = 0, not request.left
        handoff.num_ready = handoff.blocks_final(request.left)
        if handoff.is_granted:
            self._put_due(handoff)
            if handoff.is_computed:
                self._announce(handoff, handoff.num_blocks - request.num_kept, True)
            else:
                self._name_put(handoff)

    def turn(self) -> None:
        """The loop turns. It looks at the layers, which matters where a rate has changed."""
        if self._stride and self._is_overdue:
            self._note_layers(self._num_done())
            self._await_layers()

    def _num_done(self) -> int:
        """Layers of the running step that are final, in strides."""
        if not (stride := self._stride) or not self._seconds:
            return 0
        num_layers = self._num_layers
        share = (self._events.now - self._begun_at) / self._seconds
        done = max(0, int(share * num_layers / stride + 1e-9)) * stride
        return done if done < num_layers else (num_layers - 1) // stride * stride

    def _note_layers(self, num_layers: int) -> None:
        for handoff in self._filling if num_layers else ():
            stop, layers_put = handoff.stop, handoff.layers_put
            if stop > handoff.num_ready and (not layers_put or stop == handoff.filling):
                handoff.filling, handoff.layers_ready = stop, num_layers
                num = stop - handoff.num_put
                if handoff.is_granted and num > 0 and num_layers - layers_put >= self._slice(handoff, num):
                    self._put_layers(handoff, num_layers)

    def _await_layers(self, seen: int | None = None) -> None:
        """Look again when some of the running step's layers leave. ``seen``: those that are final now."""
        if not (stride := self._stride):
            return
        wanted = num_layers = self._num_layers
        for handoff in self._filling:
            num_put, stop, layers_put = handoff.num_put, handoff.stop, handoff.layers_put
            if handoff.is_granted and stop > num_put and stop > handoff.num_ready:
                slice_ = self._slice(handoff, stop - num_put)
                if layers_put + slice_ < wanted and (not layers_put or stop == handoff.filling):
                    wanted = layers_put + slice_
        if wanted < num_layers:
            if seen is None:
                seen = self._num_done()
            self._is_overdue = wanted <= seen
            look = seen + stride if wanted <= seen else -(-wanted // stride) * stride
            if look < num_layers and look != self._awaited:
                self._awaited = look
                at = self._begun_at + self._seconds * look / num_layers
                self._events.at(at, self._layers_done, self._step, look)

    def _layers_done(self, step: int, num_layers: int) -> None:
        if step != self._step or num_layers != self._awaited or not self._stride:
            return
        self._ending = ending = list[Handoff]()
        self._note_layers(num_layers)
        self._ending = None
        if len(ending) == 1 and self._settle_ahead(ending[0], num_layers + self._stride):
            self._await_layers(num_layers)
            if not self._is_overdue:
                return
            self._settle_later()
        else:
            for handoff in ending:
                self._events.at(handoff.contact.until, self._written, handoff)
        self._await_layers(num_layers)

    def _settle_ahead(self, handoff: Handoff, following: int) -> bool:
        """Its put has begun. If that ends before the next look at ``following`` layers or the step's end,
        and nothing else waits for that end, its rate is taken now: return whether."""
        contact, now = handoff.contact, self._events.now
        if contact.since < now or handoff.held_back or now < self._ahead_until:
            return False
        following = min(following, self._num_layers)
        if self._begun_at + self._seconds * following / self._num_layers <= contact.until:
            return False
        self._ahead, self._ahead_until = (handoff, contact.rate, contact.burst_bytes), contact.until
        contact.settle()
        return True

    def _settle_later(self) -> None:
        """Something comes before the put ends whose rate was taken."""
        handoff, contact_rate, num_bytes = self._ahead
        contact, self._ahead_until = handoff.contact, 0.0
        contact.rate, contact.burst_bytes = contact_rate, num_bytes
        self._events.at(contact.until, self._written, handoff)

    # --- puts ------------------------------------------------------------------------------------

    def _slice(self, handoff: Handoff, num_blocks: int) -> int:
        """Layers in a put of these blocks at the present rate."""
        rate = handoff.contact.rate or UNSEEN_RATE
        if num_blocks != handoff.slice_blocks or rate != handoff.slice_rate:
            handoff.slice_blocks, handoff.slice_rate = num_blocks, rate
            handoff.slice = self._times.slicing.layers_per_put(num_blocks, rate)
        return handoff.slice

    def _put_due(self, handoff: Handoff) -> None:
        """See ``transport/handoff/outgoing.py``."""
        ready = handoff.num_ready
        if handoff.layers_put and ready >= handoff.filling:
            self._put_layers(handoff, self._num_layers)
        if ready > handoff.num_put:
            self._put(handoff, ready - handoff.num_put, self._num_layers)
            handoff.num_put = ready
        num_put, filling = handoff.num_put, handoff.filling
        if filling > num_put and filling > ready:
            wanted = self._slice(handoff, filling - num_put)
            if handoff.layers_ready - handoff.layers_put >= wanted:
                self._put_layers(handoff, handoff.layers_ready)

    def _put_layers(self, handoff: Handoff, end: int) -> None:
        self._put(handoff, handoff.filling - handoff.num_put, end - handoff.layers_put)
        handoff.layers_put = end
        if end == self._num_layers:
            handoff.num_put, handoff.layers_put = handoff.filling, 0

    def _put(self, handoff: Handoff, num_blocks: int, num_layers: int) -> None:
        contact = handoff.contact
        if contact.place is not self._worker:
            num_bytes = self._times.bytes_of(num_blocks, num_layers)
            if not contact.burst_bytes:
                contact.since = self._events.now
            contact.burst_bytes += num_bytes
            handoff.written_at = contact.until = self._link.transfer(
                contact.place, num_bytes, num_blocks if num_layers < self._num_layers else 0
            )
            if self._ending is None:
                self._events.at(contact.until, self._written, handoff)
            else:
                self._ending.append(handoff)

    def _written(self, handoff: Handoff) -> None:
        """A put of it has ended."""
        if self._events.now < self._ahead_until:
            self._settle_later()
        if self._is_overdue:
            self.turn()
        now, contact = self._events.now, handoff.contact
        if contact.until <= now and contact.settle():
            self._await_layers()
        if handoff.held_back and handoff.written_at <= now:
            held_back, handoff.held_back = handoff.held_back, []
            for num_blocks, is_last in held_back:
                self._announce(handoff, num_blocks, is_last)

    def _name_put(self, handoff: Handoff) -> None:
        """Name the blocks that have left whole."""
        if handoff.num_put > handoff.num_placed:
            num, handoff.num_placed = handoff.num_put - handoff.num_placed, handoff.num_put
            self._announce(handoff, num, False)

    def _announce(self, handoff: Handoff, num_blocks: int, is_last: bool) -> None:
        """Name these blocks, which are then checked there, as soon as no put of this prompt is under way."""
        place, check = handoff.contact.place, self._link.check
        if handoff.written_at > self._events.now:
            handoff.held_back.append((num_blocks, is_last))
        elif is_last:
            check(place, num_blocks, place.joins, handoff.request)
        else:
            check(place, num_blocks, place.turn)
