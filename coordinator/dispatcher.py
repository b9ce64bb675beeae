"""The lifecycle's shell: the control socket that workers connect to, the clock, and the sinks of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import defaultdict
from dataclasses import asdict

from ..transport.channels.channels import RouterChannel
from ..transport.channels.coordinator_link import identity_of, worker_of
from ..transport.channels.event_loop import Attachment, attach
from ..transport.channels.keys import ClusterKey
from ..transport.messages.messages import FROM_WORKER, Message, Role
from .lifecycle.actions import Action, End, Push, PushPromptLogprobs, Send
from .lifecycle.flips import FlipRecord
from .lifecycle.lifecycle import Lifecycle
from .lifecycle.membership import DRAINED
from .lifecycle.request import Ended, Request, Sink
from .lifecycle.worker import WorkerId
from .listeners import ListenerFailures, Listeners
from .metrics.system_snapshot import SystemSnapshot
from .process_watch import ProcessWatch
from .system_view import debug_state, is_ready, system_snapshot

TICK_S = 0.05
TICK_LIMIT = 10_000  # messages
LAST_MESSAGES_S = 0.05
"""After a process has ended its last messages are read for this time: another thread receives and decrypts
them."""
_log = logging.getLogger(__name__)


class SocketDispatcher:
    """Carries out the lifecycle's actions. Lives on one event loop; ``start`` and ``stop`` are called
    there."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        control_address: str,
        key: ClusterKey | None,
        failures: ListenerFailures | None = None,
    ) -> None:
        """Bind the control socket. Raises AddressError."""
        self._core = lifecycle
        self._channel = RouterChannel.bind(control_address, key, FROM_WORKER)
        self._channel.watch_connections()
        self.address = self._channel.address
        self._attachment: Attachment | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._processes = ProcessWatch(self._process_ended)
        self._endings: dict[WorkerId, asyncio.TimerHandle] = {}
        self._longest = 0
        self._known: dict[tuple[str, int], str] = {}
        self._outbox: defaultdict[WorkerId, list[Message]] = defaultdict(list)
        self.listeners: Listeners[[Request, Ended]] = Listeners(failures)
        """Called for each request that has ended."""

    def start(self) -> None:
        """Begin to receive from the workers."""
        loop = asyncio.get_running_loop()
        self._attachment = attach(loop, self._channel, self._receive)
        self._tick()

    def stop(self) -> None:
        """Close the socket. Workers notice, and reconnect when there is a coordinator again."""
        if self._timer is not None:
            self._timer.cancel()
        if self._attachment is not None:
            self._attachment.close()
        self._send_outbox()
        self._processes.close()
        for ending in self._endings.values():
            ending.cancel()
        self._channel.close()

    def change_key(self, key: ClusterKey) -> None:
        """Change the cluster's key; see ``RouterChannel.change_key``."""
        self._channel.change_key(key)

    # --- for the HTTP side (``Dispatcher``) ------------------------------------------------------

    def submit(self, request: Request) -> None:
        self._carry_out(self._core.submit(request, time.monotonic()))

    def cancel(self, request_id: str) -> None:
        self._carry_out(self._core.cancel(request_id, time.monotonic()))

    def ready(self) -> bool:
        return is_ready(self._core)

    def failing(self) -> str:
        return self._core.outcomes.failing

    def gap(self) -> str:
        return self._core.gap(time.monotonic())

    def drain(self, worker_id: str, timeout_s: float | None) -> dict[str, object] | None:
        worker, actions = self._core.drain(worker_id, timeout_s)
        self._carry_out(actions)
        if worker is None:
            return None
        _log.info(
            "%s worker %s is to leave; it holds %d requests", worker.role, worker_id, len(worker.dispatches)
        )
        return {
            "worker_id": worker_id,
            "role": worker.role,
            "draining": True,
            "requests": self._core.request_ids(worker),
        }

    def flip(self, worker_id: str, role: Role, timeout_s: float | None) -> dict[str, object] | str | None:
        now = time.monotonic()
        ordered, actions = self._core.flip(worker_id, role, timeout_s, now)
        self._carry_out(actions)
        if not isinstance(ordered, FlipRecord):
            return ordered
        _log.info("worker %s is to become a %s worker", ordered.process, role)
        return ordered.as_json(now)

    def flips(self) -> list[dict[str, object]]:
        now = time.monotonic()
        return [record.as_json(now) for record in self._core.flips.latest]

    def snapshot(self) -> dict[str, object]:
        """Return the state for /debug/state, JSON-ready."""
        return {
            "coordinator": {
                "pid": os.getpid(),
                "incarnation": self._core.incarnation,
                "control_address": self.address,
                "ready": self.ready(),
            },
            "channel": asdict(self._channel.counters),
            **debug_state(self._core, time.monotonic()),
        }

    def system(self) -> SystemSnapshot:
        """Return the state for /metrics and the dashboard."""
        return system_snapshot(self._core)

    # --- the workers -----------------------------------------------------------------------------

    def _receive(self, messages: list[tuple[bytes, Message]]) -> None:
        """Receive messages that arrived together. Their tokens are written together, so that a coordinator
        that falls behind writes longer chunks, not more of them."""
        now = time.monotonic()
        actions: list[Action] = []
        for identity, message in messages:
            worker = worker_of(identity)
            if worker is not None:
                actions += self._core.receive(worker, message, now)
        self._carry_out(actions)

    def _process_ended(self, worker: WorkerId) -> None:
        """Remove a worker whose process has ended, once its last messages were read."""
        self._core.process_ending(worker)
        self._endings[worker] = asyncio.get_running_loop().call_later(
            LAST_MESSAGES_S, self._remove_ended, worker
        )

    def _remove_ended(self, worker: WorkerId) -> None:
        del self._endings[worker]
        self._receive(self._channel.receive(TICK_LIMIT))
        self._carry_out(self._core.process_ended(worker, time.monotonic()))
        self._log_changes()

    def _tick(self) -> None:
        # The next tick is set first: whatever this one raises, deadlines and dead workers are checked again.
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._receive(self._channel.receive(TICK_LIMIT))  # after a stall, read all messages first
        now = time.monotonic()
        if self._channel.lost_any(now):
            self._core.connection_lost()
        self._carry_out(self._core.tick(now))
        self._log_changes()

    def _carry_out(self, actions: list[Action]) -> None:
        """Carry out all actions, whatever a sink or a listener raises: the lifecycle returns each action
        once."""
        touched: dict[Sink, Request] = {}
        for action in actions:
            if isinstance(action, Push):
                request = action.request
                sink = request.sink
                try:
                    sink.push(action.token, action.logprobs)
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
        _log.exception("%s: its tokens cannot be written; it ends with an error", request.request_id)
        sink, request.sink = request.sink, ClosedSink()
        with contextlib.suppress(Exception):  # logged above; its deadline ends the response
            sink.end(
                Ended(
                    error="failed",
                    message=f"Internal error; the server's log says more under {request.request_id}.",
                )
            )
        asyncio.get_running_loop().call_soon(self.cancel, request.request_id)

    def _send_soon(self, send: Send) -> None:
        """Send with the end of this turn of the loop, all messages to a worker together: each alone would
        wake two I/O threads."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._send_outbox)
        self._outbox[send.worker].append(send.message)

    def _send_outbox(self) -> None:
        outbox, self._outbox = self._outbox, defaultdict(list)
        counters, now = self._channel.counters, time.monotonic()
        for worker, messages in outbox.items():
            unknown = counters.dropped_unknown
            self._channel.send(identity_of(*worker), *messages)
            self._core.pools.reached(worker, counters.dropped_unknown == unknown, now)

    def _log_changes(self) -> None:
        """Log each worker that came or went."""
        now: dict[tuple[str, int], str] = {
            worker.id: worker.role for worker in self._core.pools.workers.values()
        }
        for worker_id, role in now.items():
            if worker_id not in self._known:
                self._processes.watch(self._core.pools.workers[worker_id].hello)
                _log.info("%s worker %s is here", role, worker_id[0])
        for worker_id, role in self._known.items():
            if worker_id not in now:
                self._processes.forget(worker_id)
                reason = self._core.pools.reasons_lost.get(worker_id, "lost")
                _log.log(
                    logging.INFO if reason == DRAINED else logging.WARNING,
                    "%s worker %s is gone: %s",
                    role,
                    worker_id[0],
                    reason,
                )
        if now != self._known:
            for misfit in self._core.pools.misfits():
                _log.warning(misfit)
        longest = self._core.pools.max_sequence_tokens
        if longest != self._longest:
            self._longest = longest
            _log.info(
                "requests may have %d tokens, prompt and output together; --max-model-len may lower it",
                longest,
            )
        self._known = dict(now)


class ClosedSink:
    """Ignores everything."""

    def push(self, token_id: int, logprobs: object) -> None: ...
    def push_prompt_logprobs(self, logprobs: object) -> None: ...
    def flush(self) -> None: ...
    def end(self, ended: object) -> None: ...
