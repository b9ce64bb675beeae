"""Bugs for test_teeth.py, put into the handoff and into a mover that needs a rendezvous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from simulation.agents import AgentSource
from simulation.copies import CopySource
from simulation.model import NUM_LAYERS

from splitserve.decode import sequences
from splitserve.prefill.core import PrefillCore
from splitserve.transport.handoff import granting
from splitserve.transport.handoff.leases import LeaseTable
from splitserve.transport.handoff.outgoing import Outgoing
from splitserve.transport.handoff.receiver import HandoffReceiver
from splitserve.transport.handoff.sender import HandoffSender
from splitserve.transport.messages.blocks import num_behind
from splitserve.transport.movers.lease_book import Claim, LeaseBook
from splitserve.transport.movers.nccl import NcclSource
from splitserve.transport.movers.parcel_source import ParcelSource
from splitserve.transport.movers.targets import WaysIn

Patch = pytest.MonkeyPatch


# --- the handoff -----------------------------------------------------------------------------------


def reuse_blocks_that_a_stalled_writer_may_still_write(patch: Patch) -> None:
    end = LeaseTable.end

    def broken(self: Any, incoming: Any, *args: Any) -> None:
        incoming.mover = "tcp"
        end(self, incoming, *args)

    patch.setattr(LeaseTable, "end", broken)


def let_the_quarantine_end_with_time(patch: Patch) -> None:
    tick = HandoffReceiver.tick

    def broken(self: Any, now: float) -> None:
        for lease, ended in list(self.leases.quarantine.leases.items()):
            if ended.asked > 0 and now - ended.asked > 0.1:
                self.leases.free(lease)
        tick(self, now)

    patch.setattr(HandoffReceiver, "tick", broken)


def never_let_the_quarantine_end(patch: Patch) -> None:
    patch.setattr(LeaseTable, "free", lambda self, lease: None)


def believe_corrupt_blocks(patch: Patch) -> None:
    verified = HandoffReceiver.verified
    patch.setattr(
        HandoffReceiver,
        "verified",
        lambda self, lease, positions, wrong, now: verified(self, lease, positions, [], now),
    )


def cache_blocks_before_they_are_verified(patch: Patch) -> None:
    check = HandoffReceiver._check

    def broken(self: Any, incoming: Any) -> None:
        check(self, incoming)
        for i, block_hash in enumerate(incoming.hashes):
            if i in incoming.checking:
                self.leases._pool.commit(
                    incoming.blocks[i], block_hash, incoming.hashes[i - 1] if i else None
                )

    patch.setattr(HandoffReceiver, "_check", broken)


def forget_the_blocks_of_a_released_lease(patch: Patch) -> None:
    def broken(self: Any, lease: int, peer: Any) -> None:
        if (incoming := self.by_lease.get(lease)) is not None:
            self._close(incoming)

    patch.setattr(LeaseTable, "release", broken)


def let_leases_run_on(patch: Patch) -> None:
    patch.setattr(HandoffReceiver, "tick", lambda self, now: self.grant_waiting(now))


def put_again_at_the_echo_of_a_nack(patch: Patch) -> None:
    nacked = Outgoing.nacked

    def broken(self: Any, nack: Any, now: float) -> None:
        self._is_sent_again = False
        nacked(self, nack, now)

    patch.setattr(Outgoing, "nacked", broken)


def take_an_echo_of_the_handoff_for_the_second(patch: Patch) -> None:
    on_handoff = HandoffReceiver._on_handoff

    def broken(self: Any, peer: Any, message: Any, now: float) -> None:
        incoming = self.leases.by_lease.get(message.lease)
        on_handoff(self, peer, replace(message, again=incoming is not None and incoming.retried), now)

    patch.setattr(HandoffReceiver, "_on_handoff", broken)


def send_release_and_go_on_putting(patch: Patch) -> None:
    end = HandoffSender._end

    def broken(self: Any, out: Any) -> None:
        end(self, out)
        self.outgoing[out.key] = out

    patch.setattr(HandoffSender, "_end", broken)


def never_repeat_what_was_not_answered(patch: Patch) -> None:
    patch.setattr(HandoffSender, "tick", lambda self, now: None)


def free_the_prompt_before_the_ack(patch: Patch) -> None:
    first_token = PrefillCore._first_token

    def broken(self: Any, sequence: Any, *args: Any) -> None:
        first_token(self, sequence, *args)
        self.scheduler.unpin(sequence.key)

    patch.setattr(PrefillCore, "_first_token", broken)


def send_blocks_before_they_are_full(patch: Patch) -> None:
    blocks_ready = HandoffSender.blocks_ready
    patch.setattr(
        HandoffSender,
        "blocks_ready",
        lambda self, key, blocks, n, *more: blocks_ready(self, key, blocks, min(n + 1, len(blocks)), *more),
    )


def write_parcels_of_leases_that_have_ended(patch: Patch) -> None:
    patch.setattr(LeaseBook, "close", lambda self, lease: None)


def send_layers_before_they_are_computed(patch: Patch) -> None:
    layers_ready = HandoffSender.layers_ready
    patch.setattr(
        HandoffSender,
        "layers_ready",
        lambda self, key, blocks, stop, n: layers_ready(self, key, blocks, stop, min(n + 1, NUM_LAYERS)),
    )


def forget_which_layers_have_left(patch: Patch) -> None:
    put_layers = Outgoing._put_layers

    def broken(self: Any, end: int) -> None:
        put_layers(self, end)
        self._layers_put = 0

    patch.setattr(Outgoing, "_put_layers", broken)


# --- a mover that needs a rendezvous ---------------------------------------------------------------


def write_what_comes_when_its_lease_has_ended(patch: Patch) -> None:
    """Those blocks may be others' before the communicator is known to be dead."""
    patch.setattr(Claim, "valid", True)


def leave_the_other_end_of_a_closed_communicator_alone(patch: Patch) -> None:
    close = NcclSource.close

    def broken(self: Any) -> tuple[()]:
        close(self)
        self.take_messages()
        return ()

    patch.setattr(NcclSource, "close", broken)


def wait_for_ever_for_a_rendezvous(patch: Patch) -> None:
    patch.setattr(NcclSource, "poll", ParcelSource.poll)


# --- one-sided movers whose puts linger, or go on by themselves
# -----------------------------------------------------------


def free_what_a_dead_writer_held_while_its_puts_are_on_their_way(patch: Patch) -> None:
    patch.setattr(WaysIn, "_is_over", lambda self, peer: True)


def send_release_though_puts_may_still_land(patch: Patch) -> None:
    close = AgentSource.close
    patch.setattr(AgentSource, "close", lambda self: close(self) and ())


def release_a_lease_while_its_copies_go_on(patch: Patch) -> None:
    patch.setattr(CopySource, "writing", lambda self, lease: False)


def wait_for_ever_for_a_silent_writer(patch: Patch) -> None:
    patch.setattr(HandoffReceiver, "silent_writers", lambda self, now: set())


def release_a_block_that_the_next_token_still_sees(patch: Patch) -> None:
    patch.setattr(
        sequences, "num_behind", lambda num_tokens, window, size: num_behind(num_tokens + 1, window, size)
    )


def grant_no_block_that_the_window_just_reaches(patch: Patch) -> None:
    patch.setattr(
        granting, "num_behind", lambda num_tokens, window, size: num_behind(num_tokens + 1, window, size)
    )


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (reuse_blocks_that_a_stalled_writer_may_still_write, "movers"),
    (let_the_quarantine_end_with_time, "movers"),
    (never_let_the_quarantine_end, "movers"),
    (believe_corrupt_blocks, "movers"),
    (cache_blocks_before_they_are_verified, "movers"),
    (forget_the_blocks_of_a_released_lease, "network"),
    (let_leases_run_on, "network"),
    (put_again_at_the_echo_of_a_nack, "nacks"),
    (take_an_echo_of_the_handoff_for_the_second, "stalls"),
    (send_release_and_go_on_putting, "network"),
    (never_repeat_what_was_not_answered, "network"),
    (free_the_prompt_before_the_ack, "memory"),
    (send_blocks_before_they_are_full, "calm"),
    (write_parcels_of_leases_that_have_ended, "parcels"),
    (send_layers_before_they_are_computed, "calm"),
    (forget_which_layers_have_left, "calm"),
    (write_what_comes_when_its_lease_has_ended, "rendezvous"),
    (leave_the_other_end_of_a_closed_communicator_alone, "rendezvous"),
    (wait_for_ever_for_a_rendezvous, "rendezvous"),
    (free_what_a_dead_writer_held_while_its_puts_are_on_their_way, "agents"),
    (send_release_though_puts_may_still_land, "agents"),
    (wait_for_ever_for_a_silent_writer, "agents"),
    (release_a_lease_while_its_copies_go_on, "copies"),
    (release_a_block_that_the_next_token_still_sees, "window"),
    (grant_no_block_that_the_window_just_reaches, "window"),
]
"""Each with the scenario in which it is found quickly."""
