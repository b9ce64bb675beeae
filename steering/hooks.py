"""Pass the pool controller's decisions on: to a webhook, and to a command that starts and stops workers.

COMMAND up ROLE        start one more worker that begins in that role: prefill, decode, or mixed
COMMAND down WORKER    the worker has drained and ended; release its machine
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
from collections.abc import Coroutine, Mapping
from dataclasses import asdict
from typing import Any

import httpx

from .fleet import AnyRole, Decision
from .options import Mode

WEBHOOK_S = 5.0
COMMAND_S = 300.0
VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")
"""What a command inherits of the coordinator's environment, in which there may be secrets."""
_log = logging.getLogger(__name__)


class Hooks:
    """Failures are logged and not retried: the next decision follows from the state at that time."""

    def __init__(self, mode: Mode, webhook: str | None, command: str | None) -> None:
        """Raise ValueError if the command cannot be parsed."""
        self._mode, self._webhook = mode, webhook
        self._command = shlex.split(command) if command else []
        self._tasks: set[asyncio.Task[None]] = set()

    def decided(self, decision: Decision, wanted_workers: Mapping[AnyRole, int]) -> None:
        """Post a decision to the webhook, in every mode. ``wanted_workers``: by role."""
        if self._webhook:
            body = {name: value for name, value in asdict(decision).items() if name != "at"}
            self._begin(
                self._post(
                    self._webhook, {**body, "mode": self._mode, "wanted_workers": dict(wanted_workers)}
                )
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

    @property
    def busy(self) -> bool:
        """Whether a command runs, or something is being posted."""
        return bool(self._tasks)

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
