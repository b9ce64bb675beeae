"""The prefill worker's side of the KV handoff (the protocol is drawn in protocol.py)."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from ..messages.blocks import num_behind
from ..messages.messages import (
    Ack,
    FailureKind,
    Grant,
    Meet,
    Message,
    Met,
    Nack,
    Offer,
    Peer,
    PeerId,
    Refuse,
    Release,
    Renew,
    RequestSpec,
    Retire,
    Retired,
    Revoke,
    TokenLogprobs,
    from_u32,
    u64,
)
from ..movers.interface import FALLBACK_MOVER, FORMER_NAME, ONE_SIDED_MOVERS
from .contacts import Contacts
from .layer_slicing import WHOLE_BLOCKS, LayerSlicing, seen
from .outgoing import Outgoing
from .protocol import (
    CancelPuts,
    Connect,
    Delivered,
    HandoffTimes,
    Key,
    OpenMover,
    Put,
    SenderAction,
    SendHandoff,
    SendPlaced,
    ToPeer,
    Undelivered,
    Wait,
)
from .retirement import Retirement


class HandoffSender:
    """The prefill worker's side of all its handoffs. Feed it, then carry out what ``take`` returns."""

    def __init__(
        self, meet: Meet, times: HandoffTimes | None = None, slicing: LayerSlicing = WHOLE_BLOCKS
    ) -> None:
        self._meet, self._slicing = meet, slicing
        self._times = times or HandoffTimes()
        self._contacts = Contacts()
        self._outgoing: dict[Key, Outgoing] = {}
        self._retirement = Retirement()
        self.num_fallbacks = 0
        self._actions: list[SenderAction] = []
        self._to_offer: list[Outgoing] = []

    def __len__(self) -> int:
        return len(self._outgoing)

    @property
    def held(self) -> list[Key]:
        """The dispatches that are being handed over."""
        return list(self._outgoing)

    def rename(self, meet: Meet) -> None:
        """Takes a new incarnation; the movers of the old one are closed. Whoever may hold blocks for that one
        is told."""
        self.retire()
        self._meet = meet
        self._contacts.forget_failures()
        self._actions += [Connect(peer) for peer in self._retirement.unheard()]

    def retire(self) -> None:
        """Nothing is written any more under this name: the movers are closed. Whoever may hold blocks for it
        is told until it has heard (see ``has_retired``)."""
        for key in list(self._outgoing):
            self.abandon(key)
        self._contacts.clear()
        self._retirement.ended = self._meet.incarnation

    @property
    def has_retired(self) -> bool:
        """Whether nobody holds anything for a name of ours that is over."""
        return self._retirement.is_heard

    def peer_restarted(self, peer: PeerId) -> None:
        """Another process answers at this decode worker's address: whatever it held is gone with it."""
        self._retirement.restarted(peer)

    def peer_gone(self, peer: PeerId) -> None:
        """This decode worker is gone for good: whatever it held is gone with it."""
        self._retirement.forget(peer[0])

    def waits(self) -> Iterator[Wait]:
        """Every handoff that waits for its peer. (One that waits for its own prompt ends with that.)"""
        for out in self._outgoing.values():
            if out.grant is None or out.sent:
                yield Wait(out.key, "the decode worker's word", out.deadline)

    @property
    def has_actions(self) -> bool:
        """Whether there is anything to ``take``."""
        return bool(self._actions or self._to_offer)

    def take(self) -> list[SenderAction]:
        """What is to be done since the last call, in order."""
        offered, self._to_offer = self._to_offer, []
        for out in offered:
            if (
                self._outgoing.get(out.key) is out
                and out.grant is None
                and self._contacts.met(out.peer) is not None
            ):
                self._actions.append(ToPeer(out.peer, _offer_of(out)))
        actions, self._actions = self._actions, []
        return actions

    def offer(self, peer: Peer, spec: RequestSpec, num_blocks: int, hashes: list[bytes], now: float) -> None:
        """A prompt's first chunk is about to run: ask for room. (The words for it are found only when they
        are taken: by then the step has begun.)"""
        key, peer_id = (spec.coordinator, spec.dispatch), (peer.worker_id, peer.incarnation)
        self._contact(peer)
        out = Outgoing(key, peer_id, spec, num_blocks, hashes, now + self._times.grant)
        self._outgoing[key] = out
        if self._contacts.met(out.peer) is None:
            self._say(out, now)
        else:
            out.said = now
            self._to_offer.append(out)

    def blocks_ready(self, key: Key, blocks: list[int], num_ready: int) -> None:
        """The first ``num_ready`` of the prompt's own ``blocks`` have their final content."""
        out = self._outgoing.get(key)
        if out is not None:
            out.blocks, out.num_ready, out.layers_ready = blocks, num_ready, 0
            self._push(out)
            self._tell_placed(out)

    def layer_stride(self, key: Key, stop: int) -> int:
        """Every how many layers ``layers_ready`` is of use while the chunk up to block ``stop`` is computed;
        0: not at all."""
        out = self._outgoing.get(key)
        stride = 0 if out is None else out.layers_per_put(stop, self._slicing, self._contacts.rate(out.peer))
        return stride if stride < self._slicing.num_layers else 0

    def next_slice(self, key: Key, stop: int) -> int | None:
        """With how many final layers of the chunk up to block ``stop`` the next slice of it leaves, as things
        are now; None: with none."""
        out = self._outgoing.get(key)
        if out is None or not self._may_leave_in_layers(out, stop):
            return None
        return out.next_slice(stop, self._slicing, self._contacts.rate(out.peer))

    def layers_ready(self, key: Key, blocks: list[int], stop: int, num_layers: int) -> None:
        """While a chunk is computed that will make the first ``stop`` of the prompt's own ``blocks`` final:
        their first ``num_layers`` layers are. (Where the first layers of other blocks have left, by a chunk
        that ran out of memory and is computed again with another size, the rest of those leaves when they are
        final.)"""
        out = self._outgoing.get(key)
        if out is not None and self._may_leave_in_layers(out, stop):
            out.blocks, out.filling, out.layers_ready = blocks, stop, num_layers
            self._push(out)
            self._tell_placed(out)

    def finish(
        self,
        key: Key,
        blocks: list[int],
        token: int,
        logprobs: TokenLogprobs | None,
        now: float,
        num_cached_tokens: int = 0,
    ) -> None:
        """The prompt is complete, with all its ``blocks``, and has its first token. ``num_cached_tokens`` of
        it were not computed."""
        out = self._outgoing.get(key)
        if out is not None:
            out.blocks, out.num_ready, out.layers_ready = blocks, len(blocks), 0
            out.first, out.first_at, out.num_cached_tokens = (token, logprobs), now, num_cached_tokens
            self._push(out)
            self._conclude(out, now)

    def moved(self, peer: PeerId, num_bytes: int, seconds: float) -> None:
        """The shell has timed a transfer to this peer: how finely the next ones are cut depends on it."""
        contact = self._contacts.get(peer)
        if contact is not None:
            contact.rate = seen(contact.rate, num_bytes, seconds)

    def abandon(self, key: Key) -> None:
        """Nothing more will be sent for this dispatch, and nothing is under way."""
        out = self._outgoing.pop(key, None)
        if out is not None:
            self._release(out)

    def receive(self, peer: PeerId, message: Message, now: float) -> None:
        """A message from a decode worker."""
        if isinstance(message, Met):
            self._on_met(peer, message, now)
            return
        if isinstance(message, Retired):
            self._retirement.heard(peer[0], message.incarnation)
            return
        if not isinstance(message, Grant | Refuse | Ack | Nack | Revoke):
            return
        out = self._outgoing.get((message.coordinator, message.dispatch))
        if out is None or out.peer != peer:
            if (
                out is not None
                and isinstance(message, Revoke)
                and out.grant is not None
                and out.grant.lease == message.lease
            ):
                self._fail(
                    out, "peer_lost", message.reason
                )  # by the same process under a new incarnation: the lease is written no more
            elif isinstance(message, Grant | Revoke | Nack):
                self._actions.append(
                    ToPeer(
                        peer,
                        Release(
                            lease=message.lease, coordinator=message.coordinator, dispatch=message.dispatch
                        ),
                    )
                )
            return
        if isinstance(message, Grant):
            self._on_grant(out, message, now)
        elif isinstance(message, Refuse):
            self._fail(out, "refused" if message.final else "handoff_failed", message.reason)
        elif isinstance(message, Revoke):
            self._fail(out, "handoff_failed", message.reason)
        elif out.grant is not None and out.grant.lease == message.lease:
            if isinstance(message, Ack):
                del self._outgoing[out.key]
                self._contacts.mover_has_carried(peer)
                self._actions.append(Delivered(out.key))
            else:
                self._on_nack(out, message, now)

    def peer_lost(self, peer: PeerId, reason: str) -> None:
        """The decode worker is dead, unreachable, or its mover failed: should it live, it hears that its
        leases are free."""
        for out in [o for o in self._outgoing.values() if o.peer == peer]:
            self._fail(out, "peer_lost", reason)
        self._contacts.remove(peer)

    def mover_failed(self, peer: PeerId, reason: str) -> bool:
        """Handing over to this peer does not work the way that both had agreed on: what is under way is given
        back to the coordinator, and the peer met anew. Whether from now on by FALLBACK_MOVER: it takes the
        place of a mover that was forced, too."""
        falls_back = self._contacts.mover_failed(peer)
        self.num_fallbacks += falls_back
        self.peer_lost(peer, f"the KV mover failed: {reason}")
        return falls_back

    def tick(self, now: float) -> None:
        """Says again what was not answered, renews leases, and ends what is past its deadline."""
        for out in list(self._outgoing.values()):
            if now >= out.deadline and (out.grant is None or out.sent):
                waiting_for = (
                    "verify the blocks"
                    if out.sent
                    else "grant room"
                    if self._contacts.met(out.peer)
                    else "answer"
                )
                self._fail(
                    out, "handoff_failed", f"decode worker {out.peer[0]} did not {waiting_for} in time"
                )
            elif now - out.said >= self._times.resend and (out.grant is None or out.sent):
                self._say(out, now)
        self._greet(now)
        self._renew(now)
        for peer in self._retirement.to_tell(self._times.resend, now):
            self._actions.append(ToPeer(peer, Retire(incarnation=self._retirement.ended)))

    def _contact(self, peer: Peer) -> None:
        if self._contacts.add(peer):
            self._retirement.connects(peer)
            self._actions.append(Connect(peer))

    def _greet(self, now: float) -> None:
        """Says Meet again where it was not answered; forgets a decode worker that never answers."""
        for peer, contact in self._contacts.to_greet(self._times.resend, now):
            failed = self._contacts.failed_movers(peer)
            meet = replace(self._meet, movers=self._movers(failed), failed=failed, addressee=peer[1])
            self._actions.append(ToPeer(peer, meet))
            if now - contact.born > self._times.grant:
                self.peer_lost(peer, f"decode worker {peer[0]} did not answer in time")

    def _say(self, out: Outgoing, now: float) -> None:
        out.said = now
        if self._contacts.met(out.peer) is None:
            self._greet(now)
        elif out.grant is None:
            self._actions.append(ToPeer(out.peer, _offer_of(out)))
        elif out.sent and out.first is not None:
            token, logprobs = out.first
            sources = out.blocks[out.grant.num_cached_blocks : out.num_blocks]
            handoff = SendHandoff(
                out.peer,
                out.spec,
                out.grant.lease,
                token,
                logprobs,
                sources,
                out.num_cached_tokens,
                out.first_at,
                out.sent_again,
            )
            self._actions.append(handoff)

    def _movers(self, failed: tuple[str, ...]) -> tuple[str, ...]:
        """The movers to name in Meet: FALLBACK_MOVER too once another has failed, and under both of its
        names."""
        movers = [mover for mover in self._meet.movers if mover != FALLBACK_MOVER]
        with_fallback = failed or FALLBACK_MOVER in self._meet.movers
        return (*movers, FALLBACK_MOVER, FORMER_NAME) if with_fallback else tuple(movers)

    def _on_met(self, peer: PeerId, met: Met, now: float) -> None:
        if met.mover == FORMER_NAME:
            met = replace(met, mover=FALLBACK_MOVER)
        if not self._contacts.waits_for(peer, met):
            return
        if met.refused:
            self.peer_lost(peer, f"decode worker {peer[0]} refused: {met.refused}")
            return
        if (met.worker_id, met.incarnation) != peer:
            self.peer_lost(peer, f"decode worker {peer[0]} has restarted")
            return
        if not met.mover:
            # an echo of what was said to an earlier incarnation was answered: our own Meet is still on its
            # way
            return
        address = self._contacts.agree(peer, met)
        if met.mover in ONE_SIDED_MOVERS:
            self._retirement.met(address, self._meet.incarnation)
        self._actions.append(OpenMover(peer, met))
        for out in self._outgoing.values():
            if out.peer == peer:
                self._say(out, now)

    def _on_grant(self, out: Outgoing, grant: Grant, now: float) -> None:
        if out.grant is not None:
            return
        targets = from_u32(grant.blocks)
        model = self._meet.model
        behind = num_behind(out.spec.num_tokens, model.window, model.block_size)
        if len(targets) != out.num_blocks or not behind <= grant.num_cached_blocks <= out.num_blocks:
            self._fail(out, "handoff_failed", "the grant does not match the offer")
            return
        out.grant, out.targets = grant, targets
        out.num_put = out.num_placed = grant.num_cached_blocks
        self._push(out)
        if out.first is None:
            self._tell_placed(out)
        self._conclude(out, now)

    @staticmethod
    def _may_leave_in_layers(out: Outgoing, stop: int) -> bool:
        return stop > out.num_ready and (not out.layers_put or stop == out.filling)

    def _push(self, out: Outgoing) -> None:
        self._actions += out.puts_due(self._slicing, self._contacts.rate(out.peer))

    def _tell_placed(self, out: Outgoing) -> None:
        if out.grant is not None and out.num_put > out.num_placed:
            sources = out.blocks[out.num_placed : out.num_put]
            self._actions.append(SendPlaced(out.peer, out.grant.lease, out.num_placed, sources))
            out.num_placed = out.num_put

    def _conclude(self, out: Outgoing, now: float) -> None:
        if out.grant is not None and out.first is not None and out.num_put >= out.num_blocks and not out.sent:
            out.sent, out.deadline = True, now + self._times.ack
            self._say(out, now)

    def _on_nack(self, out: Outgoing, nack: Nack, now: float) -> None:
        assert out.grant is not None
        positions = [p for p in from_u32(nack.positions) if out.grant.num_cached_blocks <= p < out.num_blocks]
        if not out.sent or out.sent_again or not positions:
            return  # a second Nack is an echo: a put now could fall into blocks that have joined
        out.sent_again = True
        items = [(p, out.blocks[p], out.targets[p]) for p in positions]
        self._actions.append(Put(out.peer, out.grant.lease, out.grant.secret, items))
        out.deadline = now + self._times.ack
        self._say(out, now)

    def _renew(self, now: float) -> None:
        due: dict[PeerId, list[int]] = {}
        for out in self._outgoing.values():
            contact = self._contacts.get(out.peer)
            if (
                out.grant is not None
                and contact is not None
                and now - contact.renewed >= out.grant.lease_s / 3
            ):
                due.setdefault(out.peer, []).append(out.grant.lease)
        for peer, leases in due.items():
            self._contacts[peer].renewed = now
            self._actions.append(ToPeer(peer, Renew(leases=u64(leases))))

    def _fail(self, out: Outgoing, kind: FailureKind, message: str) -> None:
        self._outgoing.pop(out.key, None)
        self._release(out)
        self._actions.append(Undelivered(out.key, kind, message))

    def _release(self, out: Outgoing) -> None:
        """Its blocks may be anybody's from now on: what was still to be put of them, or said of it, is
        not."""
        if out.grant is not None:
            lease = out.grant.lease
            self._actions = [
                a
                for a in self._actions
                if not (isinstance(a, Put | SendPlaced | SendHandoff) and a.lease == lease)
            ]
        if self._contacts.met(out.peer) is not None:
            lease = out.grant.lease if out.grant else 0
            if lease:
                self._actions.append(CancelPuts(out.peer, lease))
            self._actions.append(
                ToPeer(out.peer, Release(lease=lease, coordinator=out.key[0], dispatch=out.key[1]))
            )


def _offer_of(out: Outgoing) -> Offer:
    spec, (coordinator, dispatch) = out.spec, out.key
    return Offer(
        request_id=spec.request_id,
        epoch=spec.epoch,
        coordinator=coordinator,
        dispatch=dispatch,
        num_tokens=spec.num_tokens,
        block_hashes=b"".join(out.hashes),
        grammar=spec.sampling.grammar,
    )
