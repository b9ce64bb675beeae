"""Bugs for test_teeth.py, put into the coordinator's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from splitserve.coordinator import dispatcher
from splitserve.coordinator.dispatcher import LifecycleDispatcher
from splitserve.transport.channels.coordinator_link import identity_of, worker_of
from splitserve.worker import played_role

Patch = pytest.MonkeyPatch


# --- actions ---------------------------------------------------------------------------------------


def send_the_outbox_in_reverse(patch: Patch) -> None:
    send = LifecycleDispatcher._send_outbox

    def broken(self: Any) -> None:
        for messages in self._outbox.values():
            messages.reverse()
        send(self)

    patch.setattr(LifecycleDispatcher, "_send_outbox", broken)


def send_to_workers_that_were_removed_meanwhile(patch: Patch) -> None:
    def broken(self: Any) -> None:
        outbox = dict(self._outbox)
        self._outbox.clear()
        for worker, messages in outbox.items():
            self._socket.reach(identity_of(*worker), *messages)

    patch.setattr(LifecycleDispatcher, "_send_outbox", broken)


def lose_the_messages_to_others_when_one_cannot_be_sent(patch: Patch) -> None:
    def broken(self: Any) -> None:
        try:
            for worker in list(self._outbox):
                self._socket.reach(identity_of(*worker), *self._outbox.pop(worker))
        finally:
            self._outbox.clear()

    patch.setattr(LifecycleDispatcher, "_send_outbox", broken)


def take_every_worker_for_connected(patch: Patch) -> None:
    send = LifecycleDispatcher._send_outbox

    def broken(self: Any) -> None:
        inner = self._core.pools.reached
        self._core.pools.reached = lambda worker, connected, now: inner(worker, True, now)
        send(self)
        self._core.pools.reached = inner

    patch.setattr(LifecycleDispatcher, "_send_outbox", broken)


def carry_out_what_a_sink_asks_for_in_the_middle(patch: Patch) -> None:
    patch.setattr(LifecycleDispatcher, "_carry_out", LifecycleDispatcher._carry_out_in_order)


def stop_at_the_first_sink_that_raises(patch: Patch) -> None:
    failed = LifecycleDispatcher._sink_failed

    def broken(self: Any, request: Any) -> None:
        failed(self, request)
        raise StopIteration

    def carry_out(self: Any, actions: Any) -> None:
        with suppress(StopIteration):
            in_order(self, actions)

    in_order = LifecycleDispatcher._carry_out_in_order
    patch.setattr(LifecycleDispatcher, "_sink_failed", broken)
    patch.setattr(LifecycleDispatcher, "_carry_out_in_order", carry_out)


def cancel_another_request_when_a_sink_raises(patch: Patch) -> None:
    failed = LifecycleDispatcher._sink_failed

    def broken(self: Any, request: Any) -> None:
        failed(self, request)
        if self._core.requests:
            self.cancel(next(iter(self._core.requests)))

    patch.setattr(LifecycleDispatcher, "_sink_failed", broken)


def go_on_pushing_to_a_sink_that_has_raised(patch: Patch) -> None:
    failed = LifecycleDispatcher._sink_failed

    def broken(self: Any, request: Any) -> None:
        sink = request.sink
        failed(self, request)
        request.sink = sink

    patch.setattr(LifecycleDispatcher, "_sink_failed", broken)


# --- the workers -----------------------------------------------------------------------------------


def lose_the_tokens_that_came_with_a_message_that_fails(patch: Patch) -> None:
    def broken(self: Any, messages: Any) -> None:
        now, actions = self._timers.now(), []
        for identity, message in messages:
            if (worker := worker_of(identity)) is not None:
                actions += self._core.receive(worker, message, now)
        self._carry_out(actions)

    patch.setattr(LifecycleDispatcher, "receive", broken)


def set_the_next_tick_after_the_work_of_this_one(patch: Patch) -> None:
    def broken(self: Any) -> None:
        self.receive(self._socket.receive(dispatcher.TICK_LIMIT))
        now = self._timers.now()
        if self._socket.lost_any():
            self._core.connection_lost()
        self._carry_out(self._core.tick(now))
        self._note_changes()
        self._next_tick = self._timers.call_later(self._tick_s, self._tick)

    patch.setattr(LifecycleDispatcher, "_tick", broken)


def tick_before_reading(patch: Patch) -> None:
    def broken(self: Any) -> None:
        self._next_tick = self._timers.call_later(self._tick_s, self._tick)
        self._carry_out(self._core.tick(self._timers.now()))
        self._note_changes()

    patch.setattr(LifecycleDispatcher, "_tick", broken)


def remove_an_ended_process_at_once(patch: Patch) -> None:
    patch.setattr(dispatcher, "LAST_MESSAGES_S", 0.0)
    patch.setattr(played_role, "LINGER_S", 0.0)  # a worker of an earlier version waits for no answer


def remove_an_ended_process_without_reading_its_last_messages(patch: Patch) -> None:
    def broken(self: Any, worker: Any) -> None:
        del self._endings[worker]
        self._carry_out(self._core.process_ended(worker, self._timers.now()))
        self._note_changes()

    patch.setattr(LifecycleDispatcher, "_remove_ended", broken)


def keep_an_ended_process_whose_last_messages_fail(patch: Patch) -> None:
    def broken(self: Any, worker: Any) -> None:
        del self._endings[worker]
        self.receive(self._socket.receive(dispatcher.TICK_LIMIT))
        self._carry_out(self._core.process_ended(worker, self._timers.now()))
        self._note_changes()

    patch.setattr(LifecycleDispatcher, "_remove_ended", broken)


def watch_the_processes_of_workers_that_are_gone(patch: Patch) -> None:
    note = LifecycleDispatcher._note_changes

    def broken(self: Any) -> None:
        here = self._core.pools.workers
        self._known = {worker: role for worker, role in self._known.items() if worker in here}
        note(self)

    patch.setattr(LifecycleDispatcher, "_note_changes", broken)


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (send_the_outbox_in_reverse, "calm"),
    (send_to_workers_that_were_removed_meanwhile, "drains"),
    (lose_the_messages_to_others_when_one_cannot_be_sent, "dispatchers"),
    (take_every_worker_for_connected, "processes"),
    (carry_out_what_a_sink_asks_for_in_the_middle, "dispatchers"),
    (stop_at_the_first_sink_that_raises, "dispatchers"),
    (cancel_another_request_when_a_sink_raises, "dispatchers"),
    (go_on_pushing_to_a_sink_that_has_raised, "dispatchers"),
    (lose_the_tokens_that_came_with_a_message_that_fails, "dispatchers"),
    (set_the_next_tick_after_the_work_of_this_one, "dispatchers"),
    (tick_before_reading, "dispatchers"),
    (remove_an_ended_process_at_once, "drains"),
    (remove_an_ended_process_without_reading_its_last_messages, "dispatchers"),
    (keep_an_ended_process_whose_last_messages_fail, "dispatchers"),
    (watch_the_processes_of_workers_that_are_gone, "processes"),
]
"""Each with the scenario in which it is found quickly."""
