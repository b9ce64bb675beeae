"""The pool controller in a running coordinator: its clock, and what carries its decisions out.

look      at the load and at the workers, once a second     -> core
report    each decision with its reason: log, webhook
act       flip; drain a worker; have one started
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from ..coordinator.lifecycle.snapshot import FinishedRequest, Snapshot
from ..transport.messages.messages import Role
from .fleet import Decision
from .hooks import Hooks
from .steering import Steering

_log = logging.getLogger(__name__)


class Workers(Protocol):
    """What is done to workers: see ``SocketDispatcher``."""

    def flip(self, worker_id: str, role: Role, timeout_s: float | None) -> dict[str, object] | str | None: ...
    def drain(self, worker_id: str, timeout_s: float | None) -> dict[str, object] | None: ...
    def lend_decode(self, allowed: bool) -> None: ...


class SteeringShell:
    """Runs until cancelled. ``note`` takes every sequence that ends."""

    def __init__(
        self, steering: Steering, snapshot: Callable[[], Snapshot], workers: Workers, hooks: Hooks
    ) -> None:
        self._core, self._snapshot, self._workers, self._hooks = steering, snapshot, workers, hooks
        self._leaving: dict[str, str] = {}  # workers that drain, with their names for the command
        self._broken = ""
        self.counts: Counter[str] = Counter()
        """Decisions by kind."""

    def note(self, request: FinishedRequest) -> None:
        """Take in a request that is over."""
        self._core.note(request, time.monotonic())

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._core.options.every_s)
                self._turn()
        except Exception as error:  # the coordinator serves on: nothing of that depends on steering
            self._broken = f"stopped by an error of its own, and changes nothing any more: {error!r}"
            _log.exception(
                "steering: stopped by an error of its own; roles stay as they are until the "
                "coordinator is started again"
            )
        finally:
            self._workers.lend_decode(True)
            await self._hooks.close()

    def as_json(self) -> dict[str, Any]:
        """For /debug/state, /metrics and the dashboard."""
        state = self._core.as_json(time.monotonic())
        return {**state, "state": self._broken or state["state"], "counts": dict(self.counts)}

    def _turn(self) -> None:
        snapshot = self._snapshot()
        for decision in self._core.look(snapshot, time.monotonic()):
            self.counts[decision.kind] += 1
            self._report(decision)
            self._hooks.decided(decision, self._core.controller.wanted)
            if self._core.options.mode == "act":
                self._act(decision, snapshot)
        self._workers.lend_decode(self._core.options.mode != "act" or self._core.controller.lends_decode)
        self._look_after_leaving(snapshot)

    def _report(self, decision: Decision) -> None:
        verb = {
            "flip": f"{decision.worker} should become a {decision.role} worker",
            "scale_up": f"one more {decision.role} worker",
        }
        verb |= {"hold": "nothing changes its role"}
        what = verb.get(decision.kind, f"one {decision.role} worker fewer, {decision.worker}")
        _log.info("steering (%s): %s: %s", self._core.options.mode, what, decision.reason)

    def _act(self, decision: Decision, snapshot: Snapshot) -> None:
        if decision.kind == "flip" and decision.role != "mixed":
            done = self._workers.flip(decision.worker, decision.role, None)
            if not isinstance(done, dict):
                _log.warning(
                    "steering: %s stays as it is: %s", decision.worker, done or "it is not here any more"
                )
        elif decision.kind == "scale_up":
            self._hooks.start_worker(decision.role)
        elif decision.kind == "scale_down" and not self._hooks.starts_workers:
            _log.info(
                "steering: %s stays: without --steer-command nobody could start it again", decision.worker
            )
        elif decision.kind == "scale_down":
            self._let_go(decision.worker, snapshot)

    def _let_go(self, name: str, snapshot: Snapshot) -> None:
        """Have a worker drain; the command runs once the worker has left."""
        worker = next((w for w in snapshot.workers if w.worker_id == name), None)
        if worker is not None and self._workers.drain(name, None) is not None:
            self._leaving[name] = worker.process or name

    def _look_after_leaving(self, snapshot: Snapshot) -> None:
        here = {w.worker_id for w in snapshot.workers}
        for name in sorted(self._leaving.keys() - here):
            self._hooks.worker_gone(self._leaving.pop(name))
