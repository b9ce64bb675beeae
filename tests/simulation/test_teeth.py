"""The simulator has teeth: each of these bugs, put in on purpose, is found, most within a few hundred requests.

Bugs that a second line of the protocol makes good are not here, for nothing wrong comes of them: a lost Nack (the Handoff is said again),
a skipped Fenced (a worker that is not answered says Hello again), a moved sequence that is dropped too early (notes are compared).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from simulation.campaign import run
from simulation.model import NUM_LAYERS

from splitserve.coordinator.flight import Flight
from splitserve.coordinator.flight_table import FlightTable
from splitserve.coordinator.lifecycle import Lifecycle
from splitserve.coordinator.progress import Progress
from splitserve.decode.core import DecodeCore
from splitserve.decode.rows import DecodeRows
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.engine.block_manager import BlockManager, CacheEvents
from splitserve.prefill.core import PrefillCore
from splitserve.transport.contacts import Contacts
from splitserve.transport.handoff_receiver import HandoffReceiver
from splitserve.transport.handoff_sender import HandoffSender
from splitserve.transport.lease_table import LeaseTable
from splitserve.transport.messages import u32
from splitserve.transport.movers.lease_book import Claim, LeaseBook
from splitserve.transport.movers.sending_session import SendingSession
from splitserve.transport.outgoing import Outgoing
from splitserve.transport.retirement import Retirement
from splitserve.transport.writers import Writers

BUDGET = 6_000
"""Requests within which each must be found; the everyday run makes 20,000."""
OF_THE_PATCH = ("AttributeError", "NameError", "TypeError")
"""What a bug raises that no longer fits the code it was made for."""
Patch = pytest.MonkeyPatch


# --- the handoff -----------------------------------------------------------------------------------


def reuse_blocks_that_a_stalled_writer_may_still_write(patch: Patch) -> None:
    end = HandoffReceiver._end

    def broken(self: Any, incoming: Any, *args: Any) -> None:
        how = self._writers.one_sided
        one_sided, how[incoming.peer] = how[incoming.peer], False
        end(self, incoming, *args)
        how[incoming.peer] = one_sided

    patch.setattr(HandoffReceiver, "_end", broken)


def let_the_quarantine_end_with_time(patch: Patch) -> None:
    tick = HandoffReceiver.tick

    def broken(self: Any, now: float) -> None:
        for lease, ended in list(self._leases.quarantine.leases.items()):
            if ended.asked > 0 and now - ended.asked > 0.1:
                self._leases.free(lease)
        tick(self, now)

    patch.setattr(HandoffReceiver, "tick", broken)


def never_let_the_quarantine_end(patch: Patch) -> None:
    patch.setattr(LeaseTable, "free", lambda self, lease: None)


def believe_corrupt_blocks(patch: Patch) -> None:
    verified = HandoffReceiver.verified
    patch.setattr(HandoffReceiver, "verified", lambda self, lease, positions, wrong, now: verified(self, lease, positions, [], now))


def cache_blocks_before_they_are_verified(patch: Patch) -> None:
    check = HandoffReceiver._check

    def broken(self: Any, incoming: Any) -> None:
        check(self, incoming)
        for i, block_hash in enumerate(incoming.hashes):
            if i in incoming.checking:
                self._pool.commit(incoming.blocks[i], block_hash, incoming.hashes[i - 1] if i else None)

    patch.setattr(HandoffReceiver, "_check", broken)


def forget_the_blocks_of_a_released_lease(patch: Patch) -> None:
    def broken(self: Any, peer: Any, message: Any) -> None:
        if (incoming := self._leases.by_lease.get(message.lease)) is not None:
            self._leases.take_back(incoming)

    patch.setattr(HandoffReceiver, "_on_release", broken)


def let_leases_run_on(patch: Patch) -> None:
    patch.setattr(HandoffReceiver, "tick", lambda self, now: self.grant_waiting(now))


def put_again_at_the_echo_of_a_nack(patch: Patch) -> None:
    on_nack = HandoffSender._on_nack

    def broken(self: Any, out: Any, nack: Any, now: float) -> None:
        out.sent_again = False
        on_nack(self, out, nack, now)

    patch.setattr(HandoffSender, "_on_nack", broken)


def take_an_echo_of_the_handoff_for_the_second(patch: Patch) -> None:
    on_handoff = HandoffReceiver._on_handoff

    def broken(self: Any, peer: Any, message: Any, now: float) -> None:
        incoming = self._leases.by_lease.get(message.lease)
        on_handoff(self, peer, message.model_copy(update={"again": incoming is not None and incoming.retried}), now)

    patch.setattr(HandoffReceiver, "_on_handoff", broken)


def say_release_and_put_on(patch: Patch) -> None:
    release = HandoffSender._release

    def broken(self: Any, out: Any) -> None:
        release(self, out)
        self._outgoing[out.key] = out

    patch.setattr(HandoffSender, "_release", broken)


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
        HandoffSender, "blocks_ready", lambda self, key, blocks, n, *more: blocks_ready(self, key, blocks, min(n + 1, len(blocks)), *more)
    )


def write_parcels_of_leases_that_have_ended(patch: Patch) -> None:
    patch.setattr(LeaseBook, "close", lambda self, lease: None)


def send_layers_before_they_are_computed(patch: Patch) -> None:
    layers_ready = HandoffSender.layers_ready
    patch.setattr(
        HandoffSender, "layers_ready", lambda self, key, blocks, stop, n: layers_ready(self, key, blocks, stop, min(n + 1, NUM_LAYERS))
    )


def forget_which_layers_have_left(patch: Patch) -> None:
    put_layers = Outgoing._put_layers

    def broken(self: Any, end: int, slicing: Any) -> Any:
        put = put_layers(self, end, slicing)
        self.layers_put = 0
        return put

    patch.setattr(Outgoing, "_put_layers", broken)


# --- a mover that needs a rendezvous ---------------------------------------------------------------


def write_what_comes_when_its_lease_has_ended(patch: Patch) -> None:
    """Those blocks may be others' before the communicator is known to be dead."""
    patch.setattr(Claim, "valid", True)


def leave_the_other_end_of_a_closed_communicator_alone(patch: Patch) -> None:
    close = SendingSession.close

    def broken(self: Any) -> None:
        close(self)
        self.words()

    patch.setattr(SendingSession, "close", broken)


def make_a_mover_that_breaks_anew_again_and_again(patch: Patch) -> None:
    mover_failed = Contacts.mover_failed

    def broken(self: Any, peer: Any) -> bool:
        self._made_anew.clear()
        return mover_failed(self, peer)

    patch.setattr(Contacts, "mover_failed", broken)


def wait_for_ever_for_a_rendezvous(patch: Patch) -> None:
    patch.setattr(SendingSession, "hangs_at", None)


# --- the workers -----------------------------------------------------------------------------------


def never_free_a_cancelled_prompt(patch: Patch) -> None:
    patch.setattr(PrefillCore, "_drop", lambda self, key: self.sender.abandon(key))


def run_a_cancelled_sequence_to_its_end(patch: Patch) -> None:
    def broken(self: Any, key: Any) -> None:
        self.receiver.cancel(key)

    patch.setattr(DecodeCore, "_drop", broken)


def give_a_block_that_is_there_already(patch: Patch) -> None:
    def broken(self: Any, sequence: Any, position: int) -> None:
        find_slot(self, sequence, position)
        if position % self._block_size == 0:
            self.beginning.add(sequence)

    find_slot = DecodeRows._find_slot
    patch.setattr(DecodeRows, "_find_slot", broken)


def wait_for_ever_for_a_grant(patch: Patch) -> None:
    offer = HandoffSender.offer

    def broken(self: Any, peer: Any, spec: Any, *args: Any) -> None:
        offer(self, peer, spec, *args)
        self._outgoing[(spec.coordinator, spec.dispatch)].deadline = inf

    patch.setattr(HandoffSender, "offer", broken)


def free_blocks_in_the_middle_of_a_step(patch: Patch) -> None:
    drop = DecodeScheduler.drop

    def broken(self: Any, key: Any) -> bool:
        sequence = self._by_key.get(key)
        if sequence is not None and sequence.in_flight:
            self.blocks.release(sequence.blocks)
            sequence.blocks = []
        return drop(self, key)

    patch.setattr(DecodeScheduler, "drop", broken)


def move_a_row_without_its_blocks(patch: Patch) -> None:
    leave = DecodeRows.leave

    def broken(self: Any, sequence: Any) -> None:
        tables = self._tables.copy()
        leave(self, sequence)
        self._tables = tables

    patch.setattr(DecodeRows, "leave", broken)


def free_blocks_that_the_step_ahead_writes(patch: Patch) -> None:
    complete = DecodeScheduler.complete

    def broken(self: Any, step: Any, output: Any) -> Any:
        result = complete(self, step, output)
        for sequence in [step.sequences[row] for row in result.finished]:
            self.blocks.release(sequence.blocks)
            sequence.blocks = []
        return result

    patch.setattr(DecodeScheduler, "complete", broken)


def feed_on_the_token_of_another_row(patch: Patch) -> None:
    leave = DecodeRows.leave

    def broken(self: Any, sequence: Any) -> None:
        fed_from = self._fed_from.copy()
        leave(self, sequence)
        self._fed_from[:] = fed_from

    patch.setattr(DecodeRows, "leave", broken)


def cache_a_block_one_token_early(patch: Patch) -> None:
    commit = DecodeScheduler._commit

    def broken(self: Any, sequence: Any, block: int) -> None:
        commit(self, sequence, block)
        if self.blocks._references[sequence.blocks[block]] == 1:
            self.blocks.release([sequence.blocks[block]])

    patch.setattr(DecodeScheduler, "_commit", broken)


def take_up_cached_blocks_without_a_reference(patch: Patch) -> None:
    patch.setattr(BlockManager, "acquire_prefix", lambda self, hashes: [self._block_of[h] for h in hashes[: self.match_prefix(hashes)]])


def evict_blocks_and_keep_their_names(patch: Patch) -> None:
    patch.setattr(BlockManager, "_forget", lambda self, block: None)


# --- the coordinator -------------------------------------------------------------------------------


def pass_on_tokens_whatever_their_index(patch: Patch) -> None:
    def broken(self: Any, flight: Any, index: int, token: int, logprobs: Any, reason: Any, now: float) -> None:
        self._push(flight, token, logprobs, reason, now)

    patch.setattr(Progress, "_unusual_row", broken)


def dispatch_again_without_the_tokens_the_client_has(patch: Patch) -> None:
    patch.setattr(Flight, "column", lambda self: u32(self.request.prompt_token_ids))


def never_compare_notes(patch: Patch) -> None:
    patch.setattr(Lifecycle, "_is_lost", lambda self, flight, now: False)


def keep_blocks_promised_to_what_is_over(patch: Patch) -> None:
    patch.setattr(FlightTable, "unpromise_blocks", lambda self, flight: None)


# --- several coordinators --------------------------------------------------------------------------


def drop_the_work_of_all_when_one_coordinator_is_gone(patch: Patch) -> None:
    for core in (PrefillCore, DecodeCore):
        patch.setattr(core, "drop_others", lambda self, *coordinators, drop=core.drop_others: drop(self, *coordinators[:1]))


def cancel_whoever_has_that_dispatch_number(patch: Patch) -> None:
    patch.setattr(DecodeCore, "_drop", _drop_by_number(DecodeCore._drop, lambda core: core._held()))
    patch.setattr(PrefillCore, "_drop", _drop_by_number(PrefillCore._drop, lambda core: core.scheduler.held))


def _drop_by_number(drop: Callable[[Any, Any], None], held: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    def broken(self: Any, key: Any) -> None:
        for other in [key, *held(self)]:
            if other[1] == key[1]:
                drop(self, other)

    return broken


# --- workers that change their roles ---------------------------------------------------------------


def end_a_role_while_somebody_may_still_write(patch: Patch) -> None:
    patch.setattr(DecodeCore, "at_rest", property(lambda self: True))


def have_both_roles_of_a_process_read_one_list_of_the_caches_changes(patch: Patch) -> None:
    watch = BlockManager.watch

    def watch_what_the_first_watches(blocks: BlockManager) -> CacheEvents:
        if blocks._watchers:
            return blocks._watchers[0]
        events = watch(blocks)
        patch.setattr(events, "close", lambda: None)
        return events

    patch.setattr(BlockManager, "watch", watch_what_the_first_watches)


def end_a_role_without_a_word(patch: Patch) -> None:
    patch.setattr(Retirement, "is_heard", True)


def say_once_that_a_role_is_over(patch: Patch) -> None:
    to_tell = Retirement.to_tell
    patch.setattr(Retirement, "to_tell", lambda self, every_s, now: to_tell(self, 1e6, now))


def take_the_end_of_a_name_for_that_of_the_next(patch: Patch) -> None:
    retire = Writers.retire
    patch.setattr(Writers, "retire", lambda self, peer, message: retire(self, peer, message.model_copy(update={"incarnation": 1 << 60})))


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (reuse_blocks_that_a_stalled_writer_may_still_write, "movers"),
    (let_the_quarantine_end_with_time, "movers"),
    (never_let_the_quarantine_end, "movers"),
    (believe_corrupt_blocks, "movers"),
    (cache_blocks_before_they_are_verified, "movers"),
    (forget_the_blocks_of_a_released_lease, "network"),
    (let_leases_run_on, "network"),
    (put_again_at_the_echo_of_a_nack, "echoes"),
    (take_an_echo_of_the_handoff_for_the_second, "writers"),
    (say_release_and_put_on, "network"),
    (never_repeat_what_was_not_answered, "network"),
    (free_the_prompt_before_the_ack, "memory"),
    (send_blocks_before_they_are_full, "calm"),
    (write_parcels_of_leases_that_have_ended, "network"),
    (send_layers_before_they_are_computed, "calm"),
    (forget_which_layers_have_left, "calm"),
    (write_what_comes_when_its_lease_has_ended, "rendezvous"),
    (leave_the_other_end_of_a_closed_communicator_alone, "rendezvous"),
    (make_a_mover_that_breaks_anew_again_and_again, "rendezvous"),
    (wait_for_ever_for_a_rendezvous, "rendezvous"),
    (never_free_a_cancelled_prompt, "network"),
    (run_a_cancelled_sequence_to_its_end, "network"),
    (give_a_block_that_is_there_already, "processes"),
    (wait_for_ever_for_a_grant, "calm"),
    (free_blocks_in_the_middle_of_a_step, "memory"),
    (move_a_row_without_its_blocks, "calm"),
    (free_blocks_that_the_step_ahead_writes, "calm"),
    (feed_on_the_token_of_another_row, "calm"),
    (cache_a_block_one_token_early, "calm"),
    (take_up_cached_blocks_without_a_reference, "calm"),
    (evict_blocks_and_keep_their_names, "memory"),
    (pass_on_tokens_whatever_their_index, "network"),
    (dispatch_again_without_the_tokens_the_client_has, "processes"),
    (never_compare_notes, "network"),
    (keep_blocks_promised_to_what_is_over, "calm"),
    (drop_the_work_of_all_when_one_coordinator_is_gone, "coordinators"),
    (cancel_whoever_has_that_dispatch_number, "coordinators"),
    (end_a_role_while_somebody_may_still_write, "flips"),
    (have_both_roles_of_a_process_read_one_list_of_the_caches_changes, "mixed"),
    (end_a_role_without_a_word, "flips"),
    (say_once_that_a_role_is_over, "flips"),
    (take_the_end_of_a_name_for_that_of_the_next, "flips"),
]


@pytest.mark.parametrize(("bug", "scenario"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_a_deliberate_bug_is_found(bug: Callable[[Patch], None], scenario: str, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    report = run(1, BUDGET, scenario)
    assert report.failures, f"not found within {report.num_requests} requests"
    assert not any(error in report.failures[0] for error in OF_THE_PATCH), f"it no longer fits the code: {report.failures[0]}"
    print(f"found within {report.num_requests} requests: {report.failures[0]}")
