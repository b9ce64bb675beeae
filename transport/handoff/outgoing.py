"""The handoff of one prompt, as its sender knows it. Pure.

OFFERED   Offer, repeated, until the grant
GRANTED   blocks leave as they become final, whole or a few layers at a time; Placed names their checksums
SENT      the prompt is complete and all its blocks have left: Handoff, repeated, until the Ack
"""

from __future__ import annotations

from ..messages.messages import Grant, Handoff, Nack, Offer, Release, RequestSpec, TokenLogprobs, from_u32
from .layer_slicing import UNSEEN_RATE, LayerSlicing
from .meetings import Contact
from .protocol import CancelPuts, HandoffTimes, Key, Put, SenderAction, SendHandoff, SendPlaced, ToPeer


class Outgoing:
    """One prompt on its way out, and which of its blocks have left. Adds to ``actions``."""

    def __init__(
        self,
        contact: Contact,
        spec: RequestSpec,
        num_blocks: int,
        hashes: list[bytes],
        slicing: LayerSlicing,
        times: HandoffTimes,
        actions: list[SenderAction],
        now: float,
        is_test: bool = False,
        is_prefix: bool = False,
    ) -> None:
        """``is_test``: of the contact's mover, before any prompt. ``is_prefix``: cached blocks."""
        self.is_test, self.is_prefix = is_test, is_prefix
        self.key: Key = (spec.coordinator, spec.dispatch)
        self.peer = (contact.peer.worker_id, contact.peer.incarnation)
        self.contact, self.spec, self._num_blocks, self._hashes = contact, spec, num_blocks, hashes
        self._slicing, self._times, self._actions = slicing, times, actions
        self.sent_at = now  # when Offer or Handoff was last sent
        self.deadline = now + (times.prefix if is_prefix else times.grant)
        self.grant: Grant | None = None
        self.is_sent = False
        self._is_sent_again = False
        self._targets: list[int] = []
        self._blocks: list[int] = []  # own blocks, in order
        self._num_ready = 0  # leading own blocks that are final
        self._num_put = 0  # leading own blocks that have left whole
        self._num_placed = 0  # leading own blocks that Placed has named
        self._filling = 0  # blocks [num_ready, filling) are final down to layer ``layers_ready``
        self._layers_ready = 0
        self._layers_put = 0  # of blocks [num_put, filling), these layers have left
        self._first: tuple[int, TokenLogprobs | None] | None = None  # the first token: the prompt is complete
        self._first_at = 0.0
        self._num_cached_tokens = 0  # of the prompt, found in the prefix cache

    @property
    def lease(self) -> int | None:
        return None if self.grant is None else self.grant.lease

    @property
    def missing(self) -> str:
        """What the peer has still to do."""
        if self.is_sent:
            return "verify the blocks"
        return "answer" if self.contact.met is None else "grant room"  # to the self-test, perhaps

    @property
    def waits_for_peer(self) -> bool:
        """Whether the next event is the peer's. (Otherwise it is the prompt's next chunk.)"""
        return self.grant is None or self.is_sent

    def send(self, now: float) -> None:
        """Send Offer or Handoff, whichever is due, unless the peer has not been met."""
        self.sent_at = now
        if self.contact.met is None or not (self.contact.is_tested or self.is_test):
            return
        spec = self.spec
        if self.grant is None:
            offer = Offer(
                request_id=spec.request_id,
                epoch=spec.epoch,
                coordinator=spec.coordinator,
                dispatch=spec.dispatch,
                num_tokens=spec.num_tokens,
                block_hashes=b"".join(self._hashes),
                grammar=spec.sampling.grammar,
                is_test=self.is_test,
                is_prefix=self.is_prefix,
                adapter=spec.adapter,
            )
            self._actions.append(ToPeer(self.peer, offer))
        elif self.is_sent and self._first is not None:
            token, logprobs = self._first
            handoff = Handoff(
                spec=spec,
                lease=self.grant.lease,
                token=token,
                logprobs=logprobs,
                checksums=b"",
                num_cached_tokens=self._num_cached_tokens,
                again=self._is_sent_again,
            )
            travelling = self._blocks[self.grant.num_cached_blocks : self._num_blocks]
            self._actions.append(SendHandoff(self.peer, handoff.lease, handoff, travelling, self._first_at))

    def granted(self, grant: Grant, num_behind: int, now: float) -> bool:
        """Take the grant. Return False if it does not match the offer. ``num_behind``: leading blocks behind
        the sliding window."""
        targets = from_u32(grant.blocks)
        if len(targets) != self._num_blocks or not num_behind <= grant.num_cached_blocks <= self._num_blocks:
            return False
        self.grant, self._targets = grant, targets
        self._num_put = self._num_placed = grant.num_cached_blocks
        self._put_due()
        if self._first is None:
            self._send_placed()
        self._conclude(now)
        return True

    def blocks_ready(self, blocks: list[int], num_ready: int) -> None:
        """The first ``num_ready`` of the prompt's own ``blocks`` have their final content."""
        self._blocks, self._num_ready, self._layers_ready = blocks, num_ready, 0
        self._put_due()
        self._send_placed()

    def layer_stride(self, stop: int) -> int:
        """Return after how many further layers each ``layers_ready`` is of use while the chunk up to block
        ``stop`` is computed; 0: never."""
        num_blocks = stop - max(self._num_put, self._num_ready)
        stride = self._layers_per_put(num_blocks) if num_blocks > 0 else 0
        return stride if stride < self._slicing.num_layers else 0

    def next_slice(self, stop: int) -> int | None:
        """Return how many layers of the chunk up to block ``stop`` must be final for its next slice to leave,
        as things are now. None: no slice leaves."""
        if self.grant is None or stop <= self._num_put or not self._may_leave_in_layers(stop):
            return None
        return self._layers_put + self._layers_per_put(stop - self._num_put)

    def layers_ready(self, blocks: list[int], stop: int, num_layers: int) -> None:
        """See ``HandoffSender.layers_ready``."""
        if self._may_leave_in_layers(stop):
            self._blocks, self._filling, self._layers_ready = blocks, stop, num_layers
            self._put_due()
            self._send_placed()

    def finish(
        self,
        blocks: list[int],
        token: int,
        logprobs: TokenLogprobs | None,
        num_cached_tokens: int,
        now: float,
    ) -> None:
        """The prompt is complete, with all its ``blocks``, and has its first token."""
        self._blocks, self._num_ready, self._layers_ready = blocks, len(blocks), 0
        self._first, self._first_at, self._num_cached_tokens = (token, logprobs), now, num_cached_tokens
        self._put_due()
        self._conclude(now)

    def nacked(self, nack: Nack, now: float) -> None:
        """Put corrupt blocks again, once. A second Nack is an echo: a put now could fall into blocks that
        have joined."""
        assert self.grant is not None
        first = self.grant.num_cached_blocks
        positions = [p for p in from_u32(nack.positions) if first <= p < self._num_blocks]
        if not self.is_sent or self._is_sent_again or not positions:
            return
        self._is_sent_again = True
        items = [(p, self._blocks[p], self._targets[p]) for p in positions]
        self._actions.append(Put(self.peer, self.grant.lease, self.grant.secret, items))
        self.deadline = now + (self._times.test if self.is_test else self._times.ack)
        self.send(now)

    def release(self) -> None:
        """Stop writing, and send Release. The own blocks may be reused from now on: actions that would still
        read them are dropped."""
        lease = self.lease or 0
        if lease:
            self._actions[:] = [
                action
                for action in self._actions
                if not (isinstance(action, Put | SendPlaced | SendHandoff) and action.lease == lease)
            ]
        if self.contact.met is not None:
            if lease:
                self._actions.append(CancelPuts(self.peer, lease))
            coordinator, dispatch = self.key
            release = Release(lease=lease, coordinator=coordinator, dispatch=dispatch)
            self._actions.append(ToPeer(self.peer, release))

    def _may_leave_in_layers(self, stop: int) -> bool:
        return stop > self._num_ready and (not self._layers_put or stop == self._filling)

    def _layers_per_put(self, num_blocks: int) -> int:
        return self._slicing.layers_per_put(num_blocks, self.contact.rate or UNSEEN_RATE)

    def _put_due(self) -> None:
        """Put the rest of blocks whose first layers have left, then whole blocks, then layers of the running
        chunk."""
        if self.grant is None:
            return
        num_layers = self._slicing.num_layers
        if self._layers_put and self._num_ready >= self._filling:
            self._put_layers(num_layers)
        elif self._layers_put and self._num_ready > self._num_put:  # a smaller chunk has come to its end
            self._put(self._num_ready, (self._layers_put, num_layers))
            self._num_put = self._num_ready
        if self._num_ready > self._num_put:
            self._put(self._num_ready)
            self._num_put = self._num_ready
        if self._filling > max(self._num_put, self._num_ready):
            whole = self._layers_ready >= num_layers
            wanted = self._layers_per_put(self._filling - self._num_put)
            if self._layers_ready - self._layers_put >= wanted or (whole and self._layers_put):
                self._put_layers(self._layers_ready)

    def _put_layers(self, end: int) -> None:
        """Put the slice of the blocks being filled from the layer last put up to ``end``."""
        num_layers = self._slicing.num_layers
        layers = (self._layers_put, end)
        self._put(self._filling, None if layers == (0, num_layers) else layers)
        self._layers_put = end
        if end == num_layers:
            self._num_put, self._layers_put = self._filling, 0

    def _put(self, stop: int, layers: tuple[int, int] | None = None) -> None:
        """Put blocks [num_put, stop)."""
        assert self.grant is not None
        items = [(i, self._blocks[i], self._targets[i]) for i in range(self._num_put, stop)]
        self._actions.append(Put(self.peer, self.grant.lease, self.grant.secret, items, layers))

    def _send_placed(self) -> None:
        if self.grant is not None and self._num_put > self._num_placed:
            sources = self._blocks[self._num_placed : self._num_put]
            self._actions.append(SendPlaced(self.peer, self.grant.lease, self._num_placed, sources))
            self._num_placed = self._num_put

    def _conclude(self, now: float) -> None:
        complete = self._first is not None and self._num_put >= self._num_blocks
        if self.grant is not None and complete and not self.is_sent:
            self.is_sent = True
            self.deadline = now + (self._times.test if self.is_test else self._times.ack)
            self.send(now)
