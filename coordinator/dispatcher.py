"""The lifecycle's shell. It touches timers, a control socket, a watch on processes, and sinks.

Live, these are an event loop, ZeroMQ and this host's processes (``socket_dispatcher.py``). The planner and
the fault simulator run the same dispatcher under virtual time.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from ..transport.channels.coordinator_link import identity_of, worker_of
from ..transport.environment import ControlSocket, Timer, Timers
from ..transport.messages.messages import Hello, Message, Role
from .lifecycle.actions import Action, End, Push, PushPromptLogprobs, Send, is_for_strangers
from .lifecycle.flips import FlipRecord
from .lifecycle.lifecycle import Lifecycle
from .lifecycle.membership import DRAINED
from .lifecycle.request import Ended, Request, Sink
from .lifecycle.worker import WorkerId
from .listeners import ListenerFailures, Listeners

TICK_S = 0.05
TICK_LIMIT = 10_000  # messages
LAST_MESSAGES_S = 0.05
"""After a process has ended its last messages are read for this time: another thread receives and decrypts
them."""
_log = logging.getLogger(__name__)


class Processes(Protocol):
    """Calls ``LifecycleDispatcher.process_ended`` when a watched worker's process has ended."""

    def watch(self, hello: Hello) -> None:
        """Watch the process of this worker, if its end can be seen from here."""

    def forget(self, worker: WorkerId) -> None:
        """Stop watching it."""


class LifecycleDispatcher:
    """Carries out every action that the lifecycle returns, once and in the order of its calls.

    Sinks and listeners may raise, and may call ``submit`` and ``cancel``: what the lifecycle returns for such
    a call is carried out after the actions that are being carried out.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        timers: Timers,
        socket: ControlSocket,
        processes: Processes,
        failures: ListenerFailures | None = None,
        tick_s: float = TICK_S,
        log: logging.Logger = _log,
    ) -> None:
        self._core, self._timers, self._socket, self._processes = lifecycle, timers, socket, processes
        self._tick_s, self._log = tick_s, log
        self._next_tick: Timer | None = None
        self._endings: dict[WorkerId, Timer] = {}
        self._longest = 0
        self._known: dict[WorkerId, str] = {}
        self._version = -1  # of the pools, when ``_known`` was taken
        self._adapters: Mapping[str, str] = {}  # that were served then
        self._conflicts = frozenset[str]()  # that were logged
        self._refused: Mapping[str, str] = {}  # that were logged
        self._pending: list[Action] = []
        self._carrying_out = False
        self._outbox: defaultdict[WorkerId, list[Message]] = defaultdict(list)
        self.listeners: Listeners[[Request, Ended]] = Listeners(failures)
        """Called for each request that has ended."""

    def start(self) -> None:
        """Begin to tick."""
        self._tick()

    def stop(self) -> None:
        """Send what is pending, and set no timer any more."""
        if self._next_tick is not None:
            self._next_tick.cancel()
        for ending in self._endings.values():
            ending.cancel()
        self._send_outbox()

    # --- the HTTP side and operators --------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self._carry_out(self._core.submit(request, self._timers.now()))

    def cancel(self, request_id: str) -> None:
        self._carry_out(self._core.cancel(request_id, self._timers.now()))

    def drain(self, worker_id: str, timeout_s: float | None) -> dict[str, object] | None:
        """Have a worker or a process of several roles leave. Return what it holds, JSON-ready; None: there is
        no such worker."""
        workers, actions = self._core.drain(worker_id, timeout_s)
        self._carry_out(actions)
        if not workers:
            return None
        roles = " and ".join(worker.role for worker in workers)
        held = sorted({request_id for worker in workers for request_id in self._core.request_ids(worker)})
        self._log.info("%s worker %s is to leave; it holds %d requests", roles, worker_id, len(held))
        return {"worker_id": worker_id, "role": roles, "draining": True, "requests": held}

    def flip(self, worker_id: str, role: Role, timeout_s: float | None) -> dict[str, object] | str | None:
        """Have a worker change its role. Return a sentence where it cannot; None: there is no such worker."""
        now = self._timers.now()
        ordered, actions = self._core.flip(worker_id, role, timeout_s, now)
        self._carry_out(actions)
        if not isinstance(ordered, FlipRecord):
            return ordered
        self._log.info("worker %s is to become a %s worker", ordered.process, role)
        return ordered.as_json(now)

    def lend_decode(self, allowed: bool) -> None:
        """Let decode workers borrow prompts, or not."""
        self._core.pools.lends_decode = allowed

    # --- the workers ------------------------------------------------------------------------------------

    def receive(self, messages: list[tuple[bytes, Message]]) -> None:
        """Receive messages that arrived together. Their tokens are written together, so that a coordinator
        that falls behind writes longer chunks, not more of them."""
        now = self._timers.now()
        actions: list[Action] = []
        try:
            for identity, message in messages:
                worker = worker_of(identity)
                if worker is not None:
                    actions += self._core.receive(worker, message, now)
        finally:  # one message that the lifecycle fails on takes no other's tokens with it
            self._carry_out(actions)

    def process_ended(self, worker: WorkerId) -> None:
        """Remove a worker whose process has ended, once its last messages were read."""
        self._core.process_ending(worker)
        self._endings[worker] = self._timers.call_later(LAST_MESSAGES_S, self._remove_ended, worker)

    def _remove_ended(self, worker: WorkerId) -> None:
        del self._endings[worker]
        try:
            self.receive(self._socket.receive(TICK_LIMIT))
        finally:
            self._carry_out(self._core.process_ended(worker, self._timers.now()))
            self._note_changes()

    def _tick(self) -> None:
        # The next tick is set first: whatever this one raises, deadlines and dead workers are checked again.
        self._next_tick = self._timers.call_later(self._tick_s, self._tick)
        self.receive(self._socket.receive(TICK_LIMIT))  # after a stall, read all messages first
        now = self._timers.now()
        if self._socket.lost_any():
            self._core.connection_lost()
        self._carry_out(self._core.tick(now))
        self._note_changes()
        before, self._refused = self._refused, self._core.refused(now)
        for worker, reason in self._refused.items() - before.items():
            self._log.warning("worker %s is refused: %s", worker, reason)

    # --- actions ----------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        if self._carrying_out:
            self._pending += actions
            return
        self._carrying_out = True
        try:
            while actions:
                self._carry_out_in_order(actions)
                actions, self._pending = self._pending, []
        finally:
            self._carrying_out = False

    def _carry_out_in_order(self, actions: list[Action]) -> None:
        touched: dict[Sink, Request] = {}
        for action in actions:
            if isinstance(action, Push):
                request, token, logprobs = action
                sink = request.sink
                try:
                    sink.push(token, logprobs)
                    touched[sink] = request
                except Exception:
                    touched.pop(sink, None)
                    self._sink_failed(request)
            elif isinstance(action, Send):
                self._send_soon(action)
            else:
                self._carry_out_rare(action, touched)
        for sink, request in touched.items():
            try:
                sink.flush()
            except Exception:
                self._sink_failed(request)

    def _carry_out_rare(self, action: PushPromptLogprobs | End, touched: dict[Sink, Request]) -> None:
        request = action.request
        try:
            if isinstance(action, End):
                touched.pop(request.sink, None)
                request.sink.end(action.ended)
            else:
                request.sink.push_prompt_logprobs(action.logprobs)
        except Exception:
            self._sink_failed(request)
        if isinstance(action, End):
            self.listeners(request, action.ended)

    def _sink_failed(self, request: Request) -> None:
        """End this request alone with an error, for a defect of ours; nothing more is pushed to its sink."""
        self._log.exception("%s: its tokens cannot be written; it ends with an error", request.request_id)
        sink, request.sink = request.sink, ClosedSink()
        with contextlib.suppress(Exception):  # logged above; its deadline ends the response
            sink.end(
                Ended(
                    error="failed",
                    message=f"Internal error; the server's log says more under {request.request_id}.",
                )
            )
        self.cancel(request.request_id)

    def _send_soon(self, send: Send) -> None:
        """Send with the end of this turn of the loop, all messages to a worker together: each alone would
        wake two I/O threads."""
        if not self._outbox:
            self._timers.call_soon(self._send_outbox)
        self._outbox[send.worker].append(send.message)

    def _send_outbox(self) -> None:
        """Send all of it. A worker that is not here is sent nothing but that it is fenced or refused."""
        outbox, self._outbox = self._outbox, defaultdict(list)
        now = self._timers.now()
        for worker, messages in outbox.items():
            if worker not in self._core.pools.workers:
                messages = list(filter(is_for_strangers, messages))
            if not messages:
                continue
            try:
                reached = self._socket.reach(identity_of(*worker), *messages)
            except Exception:
                self._log.exception("%d messages to worker %s cannot be sent", len(messages), worker[0])
            else:
                self._core.pools.reached(worker, reached, now)

    # --- changes ----------------------------------------------------------------------------------------

    def _note_changes(self) -> None:
        """Watch the processes of the workers that came, forget those that went, and log both."""
        pools, known = self._core.pools, self._known
        if pools.version == self._version:
            return
        self._version, self._known = pools.version, {w.id: w.role for w in pools.workers.values()}
        for worker_id, role in self._known.items():
            if worker_id not in known:
                self._processes.watch(pools.workers[worker_id].hello)
                self._log.info("%s worker %s is here", role, worker_id[0])
        for worker_id, role in known.items():
            if worker_id not in self._known:
                self._processes.forget(worker_id)
                reason = pools.reasons_lost.get(worker_id, "lost")
                level = logging.INFO if reason == DRAINED else logging.WARNING
                self._log.log(level, "%s worker %s is gone: %s", role, worker_id[0], reason)
        if self._known != known:
            for misfit in pools.misfits():
                self._log.warning(misfit)
        self._note_adapters()
        longest = pools.max_sequence_tokens
        if longest != self._longest:
            self._longest = longest
            self._log.info(
                "requests may have %d tokens, prompt and output together; --max-model-len may lower it",
                longest,
            )

    def _note_adapters(self) -> None:
        """Log the adapters that clients may name, or no longer, and names that they may not have."""
        adapters, before = self._core.pools.adapters, self._adapters
        self._adapters = served = adapters.names().served
        if come := served.keys() - before.keys():
            self._log.info("adapters that requests may name: %s", ", ".join(sorted(come)))
        if gone := before.keys() - served.keys():
            self._log.warning("adapters that no pair of workers has any more: %s", ", ".join(sorted(gone)))
        if taken := adapters.conflicts - self._conflicts:
            self._conflicts |= taken
            self._log.warning("not served, for the model itself has the name: %s", ", ".join(sorted(taken)))


class ClosedSink:
    """Ignores everything."""

    def push(self, token_id: int, logprobs: object) -> None: ...
    def push_prompt_logprobs(self, logprobs: object) -> None: ...
    def flush(self) -> None: ...
    def end(self, ended: object) -> None: ...
