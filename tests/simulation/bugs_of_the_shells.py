"""Bugs for test_teeth.py, put into code that only the shells have: both ends of the handoff, the links to
coordinators, the steps of both roles; and into the self-test of movers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.transport.channels import coordinator_link
from splitserve.transport.channels.coordinator_link import CoordinatorLink
from splitserve.transport.channels.coordinator_links import CoordinatorLinks
from splitserve.transport.handoff import sending_end
from splitserve.transport.handoff.held_back import HeldBack
from splitserve.transport.handoff.mover_tests import MoverTests
from splitserve.transport.handoff.reachability import Reachability
from splitserve.transport.handoff.receiver import HandoffReceiver
from splitserve.transport.handoff.receiving_end import ReceivingEnd
from splitserve.transport.handoff.sender import HandoffSender
from splitserve.transport.handoff.sending_end import SendingEnd
from splitserve.worker.steps import RunningStep

Patch = pytest.MonkeyPatch


# --- the sending end -------------------------------------------------------------------------------


def release_a_lease_while_a_put_is_in_flight(patch: Patch) -> None:
    patch.setattr(HeldBack, "send", lambda self, peer, lease, writing, send: send())


def release_a_lease_whose_put_nobody_saw_end(patch: Patch) -> None:
    close = HeldBack.close
    patch.setattr(HeldBack, "close", lambda self, peer, unsettled: close(self, peer, ()))


def send_the_last_of_what_is_held_back_first(patch: Patch) -> None:
    written = HeldBack.written

    def broken(self: Any, peer: Any, writing: Any) -> None:
        if peer in self._queues:
            self._queues[peer].reverse()
        written(self, peer, writing)

    patch.setattr(HeldBack, "written", broken)


def give_up_a_peer_that_was_wanted_only_now(patch: Patch) -> None:
    """Patience counted from when it was lost."""
    judge = Reachability.judge

    def broken(self: Any, peer: Any, gone_since: Any, *args: Any) -> Any:
        self._wanted_at[peer] = -inf
        return judge(self, peer, gone_since, *args)

    patch.setattr(Reachability, "judge", broken)


def give_up_a_peer_as_soon_as_it_is_away(patch: Patch) -> None:
    """Patience counted from when it was wanted."""
    judge = Reachability.judge

    def broken(self: Any, peer: Any, gone_since: Any, *args: Any) -> Any:
        return judge(self, peer, None if gone_since is None else -inf, *args)

    patch.setattr(Reachability, "judge", broken)


def wait_for_ever_for_a_peer_beyond_reach(patch: Patch) -> None:
    patch.setattr(SendingEnd, "_give_up_unreachable", lambda self, now: None)


def cut_off_the_later_incarnation_for_an_earlier_one(patch: Patch) -> None:
    patch.setattr(sending_end, "is_earlier", lambda a, b: False)


def go_on_with_a_process_that_has_been_replaced(patch: Patch) -> None:
    patch.setattr(SendingEnd, "_replace", lambda self, peer, reason: None)


# --- the receiving end -----------------------------------------------------------------------------


def free_nothing_when_a_writer_has_died(patch: Patch) -> None:
    patch.setattr(ReceivingEnd, "release_dead_writers", lambda self, core, now: None)


def verify_some_blocks_and_forget_the_rest(patch: Patch) -> None:
    check = ReceivingEnd.check

    def broken(self: Any, core: Any, now: float) -> None:
        check(self, core, now)
        self._checks.clear()

    patch.setattr(ReceivingEnd, "check", broken)


# --- the links to coordinators ---------------------------------------------------------------------


def come_back_under_the_same_number_when_fenced(patch: Patch) -> None:
    fence = CoordinatorLink._fence

    def broken(self: Any, message: Any) -> None:
        self._incarnations = lambda: self.incarnation
        fence(self, message)

    patch.setattr(CoordinatorLink, "_fence", broken)


def send_hello_once(patch: Patch) -> None:
    patch.setattr(coordinator_link, "HELLO_EVERY_S", inf)


def never_connect_to_the_coordinators_that_another_names(patch: Patch) -> None:
    patch.setattr(CoordinatorLinks, "learn_addresses", lambda self, addresses: None)


def send_one_coordinator_the_messages_of_another(patch: Patch) -> None:
    def broken(self: Any, *messages: Any) -> None:
        for link in self._links.values():
            if link.coordinator is not None:
                link.send(*messages)

    patch.setattr(CoordinatorLinks, "send", broken)


# --- the steps of both roles ------------------------------------------------------------------------


def give_rows_the_outputs_of_chunks(patch: Patch) -> None:
    """Only where there are as many of both: otherwise the cores would notice."""
    split = StepOutput.split

    def broken(self: Any, num_rows: int) -> Any:
        rows, chunks = split(self, num_rows)
        return (chunks, rows) if len(rows.token_ids) == len(chunks.token_ids) else (rows, chunks)

    patch.setattr(StepOutput, "split", broken)


def feed_no_row_beside_chunks(patch: Patch) -> None:
    followed_by = Batch.followed_by

    def broken(self: Any, chunks: Any) -> Any:
        return replace(followed_by(self, chunks), fed_from=None)

    patch.setattr(Batch, "followed_by", broken)


def forget_the_rows_of_a_step_without_memory(patch: Patch) -> None:
    shrink = RunningStep.shrink

    def broken(self: Any, error: Any) -> None:
        if self.sequences is not None and self.prompts is not None:
            self.prompts.shrink(error)
        else:
            shrink(self, error)

    patch.setattr(RunningStep, "shrink", broken)


# --- the self-test of movers ------------------------------------------------------------------------


def let_a_self_test_never_end(patch: Patch) -> None:
    tick = HandoffSender.tick

    def broken(self: Any, now: float) -> None:
        running, self.tests.running = self.tests.running, {}
        tick(self, now)
        self.tests.running = {**running, **self.tests.running}

    patch.setattr(HandoffSender, "tick", broken)


def pass_a_self_test_on_wrong_bytes(patch: Patch) -> None:
    verified = HandoffReceiver.verified

    def broken(self: Any, lease: int, positions: list[int], wrong: list[int], now: float) -> None:
        incoming = self.leases.by_lease.get(lease)
        verified(self, lease, positions, [] if incoming and incoming.is_test else wrong, now)

    patch.setattr(HandoffReceiver, "verified", broken)


def try_a_mover_with_a_block_that_holds_someones_data(patch: Patch) -> None:
    begin = MoverTests.begin

    class Taken:
        def allocate(self, count: int) -> list[int]:
            return [0]

        def release(self, blocks: object) -> None: ...

    def broken(self: Any, *args: Any) -> bool:
        self._blocks = Taken()
        return begin(self, *args)

    patch.setattr(MoverTests, "begin", broken)


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (release_a_lease_while_a_put_is_in_flight, "copies"),
    (release_a_lease_whose_put_nobody_saw_end, "agents"),
    (send_the_last_of_what_is_held_back_first, "agents"),
    (give_up_a_peer_that_was_wanted_only_now, "processes"),
    (give_up_a_peer_as_soon_as_it_is_away, "processes"),
    (wait_for_ever_for_a_peer_beyond_reach, "network"),
    (cut_off_the_later_incarnation_for_an_earlier_one, "fences"),
    (go_on_with_a_process_that_has_been_replaced, "fences"),
    (free_nothing_when_a_writer_has_died, "meetings"),
    (verify_some_blocks_and_forget_the_rest, "calm"),
    (come_back_under_the_same_number_when_fenced, "network"),
    (send_hello_once, "network"),
    (never_connect_to_the_coordinators_that_another_names, "coordinators"),
    (send_one_coordinator_the_messages_of_another, "coordinators"),
    (give_rows_the_outputs_of_chunks, "mixed"),
    (feed_no_row_beside_chunks, "mixed"),
    (forget_the_rows_of_a_step_without_memory, "mixed"),
    (let_a_self_test_never_end, "echoes"),
    (pass_a_self_test_on_wrong_bytes, "broken movers"),
    (try_a_mover_with_a_block_that_holds_someones_data, "calm"),
]
"""Each with the scenario in which it is found quickly."""
