"""The pool controller in a running coordinator: its clock, and what carries its decisions out.

look      at the load and at the workers, once a second     -> core
report    each decision with its reason: log, webhook
act       flip; drain a worker; have one started

--steer-command starts and stops workers:

COMMAND up ROLE        start one more worker that begins in that role: prefill, decode, or mixed
COMMAND down WORKER    the worker has drained and ended; release its machine
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from ..coordinator.lifecycle.snapshot import FinishedRequest, Snapshot
from ..transport.messages.messages import Role
from .fleet import AnyRole, Decision
from .options import Mode
from .steering import Steering

WEBHOOK_S = 5.0
COMMAND_S = 300.0
VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")
"""What a command inherits of the coordinator's environment, in which there may be secrets."""
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


class Hooks:
    """Passes decisions on, to a webhook and to a command. Failures are logged and not retried: the next
    decision follows from the state at that time."""

    def __init__(self, mode: Mode, webhook: str | None, command: str | None, of_model: str = "") -> None:
        """``of_model``: its name, of several. Raise ValueError if the command cannot be parsed."""
        self._webhook = webhook
        self._about = {"mode": mode, **({"model": of_model} if of_model else {})}
        self._command = shlex.split(command) if command else []
        self._tasks: set[asyncio.Task[None]] = set()

    def decided(self, decision: Decision, wanted_workers: Mapping[AnyRole, int]) -> None:
        """Post a decision to the webhook, in every mode. ``wanted_workers``: by role."""
        if self._webhook:
            body = {name: value for name, value in asdict(decision).items() if name != "at"}
            self._begin(
                self._post(self._webhook, {**body, **self._about, "wanted_workers": dict(wanted_workers)})
            )

    def start_worker(self, role: str) -> None:
        self._run("up", role)

    def worker_gone(self, worker: str) -> None:
        """Run the command for a worker that has drained and ended."""
        self._run("down", worker)

    @property
    def starts_workers(self) -> bool:
        """Whether there is a command for it."""
        return bool(self._command)

    async def close(self) -> None:
        """Cancel posts. Running commands go on by themselves."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, *arguments: str) -> None:
        if self._command:
            self._begin(self._execute([*self._command, *arguments]))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _post(self, url: str, body: dict[str, object]) -> None:
        import httpx  # a tenth of the coordinator's start, and few have a webhook

        try:
            async with httpx.AsyncClient(timeout=WEBHOOK_S, trust_env=False) as client:
                (await client.post(url, json=body)).raise_for_status()
        except httpx.HTTPError as error:
            _log.error("steering: the webhook %s did not take a decision: %s", url, error)

    async def _execute(self, argv: list[str]) -> None:
        environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, start_new_session=True, env=environment
            )
        except OSError as error:
            _log.error("steering: cannot run %s: %s", shlex.join(argv), error)
            return
        try:
            async with asyncio.timeout(COMMAND_S):
                status = await process.wait()
        except TimeoutError:
            _log.error(
                "steering: %s has not ended after %g s; it goes on by itself", shlex.join(argv), COMMAND_S
            )
            return
        _log.log(
            logging.ERROR if status else logging.INFO,
            "steering: %s ended with status %d",
            shlex.join(argv),
            status,
        )
