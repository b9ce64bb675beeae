"""Bugs for test_teeth.py, put into workers, coordinators and processes that change their roles."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from simulation.host import Host

from splitserve.coordinator.lifecycle.assignments import Assignments
from splitserve.coordinator.lifecycle.progress import Progress
from splitserve.coordinator.lifecycle.request import Request
from splitserve.coordinator.lifecycle.state_machine import RequestStateMachine
from splitserve.coordinator.lifecycle.suspicion import Suspicion
from splitserve.decode.core import DecodeCore
from splitserve.decode.rows import DecodeRows
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.decode.sequences import SequenceBlocks
from splitserve.engine.cache.block_manager import BlockManager, CacheEvents
from splitserve.prefill.core import PrefillCore
from splitserve.transport.handoff.leases import Writers
from splitserve.transport.handoff.meetings import Retirement
from splitserve.transport.handoff.sender import HandoffSender
from splitserve.transport.messages import fields
from splitserve.transport.messages.messages import u32

Patch = pytest.MonkeyPatch


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
        if position % self.block_size == 0:
            self.beginning.add(sequence)

    def written_there(self: Any, sequence: Any, block: int) -> None:
        add_block(self, sequence, block)
        self._slots[sequence.row] = block * self.block_size
        self.beginning.discard(sequence)

    find_slot, add_block = DecodeRows._find_slot, DecodeRows.add_block
    patch.setattr(DecodeRows, "_find_slot", broken)
    patch.setattr(DecodeRows, "add_block", written_there)


def wait_for_ever_for_a_grant(patch: Patch) -> None:
    offer = HandoffSender.offer

    def broken(self: Any, peer: Any, spec: Any, *args: Any, **named: Any) -> None:
        offer(self, peer, spec, *args, **named)
        self.outgoing[(spec.coordinator, spec.dispatch)].deadline = inf

    patch.setattr(HandoffSender, "offer", broken)


def free_blocks_in_the_middle_of_a_step(patch: Patch) -> None:
    drop = DecodeScheduler.drop

    def broken(self: Any, key: Any) -> bool:
        sequence = self.running.get(key)
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
    commit = SequenceBlocks.commit

    def broken(self: Any, sequence: Any, block: int) -> None:
        commit(self, sequence, block)
        if self._blocks._references[sequence.blocks[block]] == 1:
            self._blocks.release([sequence.blocks[block]])

    patch.setattr(SequenceBlocks, "commit", broken)


def take_up_cached_blocks_without_a_reference(patch: Patch) -> None:
    patch.setattr(
        BlockManager,
        "acquire_prefix",
        lambda self, hashes: [self._block_of[h] for h in hashes[: self.match_prefix(hashes)]],
    )


def evict_blocks_and_keep_their_names(patch: Patch) -> None:
    patch.setattr(BlockManager, "_forget", lambda self, block: None)


def number_incarnations_by_the_hosts_clock(patch: Patch) -> None:
    """And compare all of a name by their numbers: the rule until clocks jumped here."""
    patch.setattr(Host, "incarnations", lambda self: self.time_ns)
    patch.setattr(fields, "COUNT_BITS", 63)


# --- the coordinator -------------------------------------------------------------------------------


def pass_on_tokens_whatever_their_index(patch: Patch) -> None:
    def broken(self: Any, request: Any, index: int, *row: Any) -> Any:
        return self._push(request, *row)

    patch.setattr(Progress, "_unusual_row", broken)


def dispatch_again_without_the_tokens_the_client_has(patch: Patch) -> None:
    patch.setattr(Request, "token_bytes", lambda self: u32(self.prompt_token_ids))


def never_compare_notes(patch: Patch) -> None:
    patch.setattr(RequestStateMachine, "retry_lost", lambda self, now: [])


def keep_blocks_promised_to_what_is_over(patch: Patch) -> None:
    patch.setattr(Assignments, "release_blocks", lambda self, request: None)


def clear_a_request_of_its_deaths_at_any_progress(patch: Patch) -> None:
    credit = Suspicion.credit

    def broken(self: Any, request: Any) -> None:
        request.num_deaths_ever = 0
        credit(self, request)

    patch.setattr(Suspicion, "credit", broken)


def charge_a_death_twice(patch: Patch) -> None:
    charge = Suspicion.charge
    patch.setattr(Suspicion, "charge", lambda self, *death: charge(self, *death) + charge(self, *death))


def give_up_an_attempt_too_soon(patch: Patch) -> None:
    retry = RequestStateMachine.retry

    def broken(self: Any, request: Any, *args: Any, counts: bool = True, **how: Any) -> Any:
        request.num_failures += counts and not request.num_failures
        return retry(self, request, *args, counts=counts, **how)

    patch.setattr(RequestStateMachine, "retry", broken)


# --- several coordinators --------------------------------------------------------------------------


def drop_the_work_of_all_when_one_coordinator_is_gone(patch: Patch) -> None:
    for core in (PrefillCore, DecodeCore):
        patch.setattr(
            core,
            "drop_others",
            lambda self, *coordinators, drop=core.drop_others: drop(self, *coordinators[:1]),
        )


def cancel_whoever_has_that_dispatch_number(patch: Patch) -> None:
    for core in (PrefillCore, DecodeCore):
        patch.setattr(core, "_drop", _drop_by_number(core._drop))


def _drop_by_number(drop: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def broken(self: Any, key: Any) -> None:
        for other in [key, *self.held]:
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
    patch.setattr(Retirement, "is_complete", True)


def announce_once_that_a_role_is_over(patch: Patch) -> None:
    due = Retirement.due
    patch.setattr(Retirement, "due", lambda self, every_s, now: due(self, 1e6, now))


def take_the_end_of_a_name_for_that_of_the_next(patch: Patch) -> None:
    retire = Writers.retire

    def broken(self: Any, peer: Any, ended: int) -> Any:
        return retire(self, peer, ended | (1 << fields.COUNT_BITS) - 1)

    patch.setattr(Writers, "retire", broken)


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (never_free_a_cancelled_prompt, "network"),
    (run_a_cancelled_sequence_to_its_end, "network"),
    (give_a_block_that_is_there_already, "processes"),
    (wait_for_ever_for_a_grant, "calm"),
    (free_blocks_in_the_middle_of_a_step, "memory"),
    (move_a_row_without_its_blocks, "calm"),
    (free_blocks_that_the_step_ahead_writes, "memory"),
    (feed_on_the_token_of_another_row, "calm"),
    (cache_a_block_one_token_early, "calm"),
    (take_up_cached_blocks_without_a_reference, "calm"),
    (evict_blocks_and_keep_their_names, "memory"),
    (number_incarnations_by_the_hosts_clock, "clocks"),
    (pass_on_tokens_whatever_their_index, "network"),
    (dispatch_again_without_the_tokens_the_client_has, "processes"),
    (never_compare_notes, "network"),
    (keep_blocks_promised_to_what_is_over, "calm"),
    (clear_a_request_of_its_deaths_at_any_progress, "poison"),
    (charge_a_death_twice, "poison"),
    (give_up_an_attempt_too_soon, "patience"),
    (drop_the_work_of_all_when_one_coordinator_is_gone, "coordinators"),
    (cancel_whoever_has_that_dispatch_number, "coordinators"),
    (end_a_role_while_somebody_may_still_write, "flips"),
    (have_both_roles_of_a_process_read_one_list_of_the_caches_changes, "mixed"),
    (end_a_role_without_a_word, "retirements"),
    (announce_once_that_a_role_is_over, "retirements"),
    (take_the_end_of_a_name_for_that_of_the_next, "flips"),
]
"""Each with the scenario in which it is found quickly."""
