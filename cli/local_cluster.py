"""``splitserve up``: runs a plan under the supervisor, shows its logs, then serves, chats or answers one
question."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TextIO

import yaml
from pydantic import BaseModel

from ..coordinator.full_disk import is_full
from ..coordinator.http.access.operators import LOGIN, Operators
from ..deploy.child_process import Command, Log, Start, start_anew
from ..deploy.early_signals import deliver_signals
from ..deploy.process_log import json_line
from ..deploy.supervisor import Supervisor
from ..deploy.worker_forks import WorkerForks
from ..engine.settings import WorkerSettings
from ..transport.process.private_files import private, write_private
from .cluster_state import is_ready, known_workers
from .config import ENV_PREFIX, ConfigError, variable_of
from .settings import ChatSettings
from .up import Plan
from .up_workers import shared

SECRETS = {"redis_url", "responses_file", "usage_url", "steer_webhook", "otlp_endpoint"}
"""Settings that may hold passwords: given to processes by their environment, never by a file."""
MAX_SOCKET_PATH = 107  # sun_path of unix(7), without its last byte
SOCKET_NAME_CHARS = len("/pymp-12345678/listener-12345678")
COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)  # of the prefixes, in turn


def run(plan: Plan, entry: str) -> int:
    """Run until stopped, or until the chat or answer is over. Return the exit status.

    ``entry``: the function that ``splitserve`` runs, as MODULE:NAME, for the workers that are forked.
    """
    if len(str(plan.folder.path)) + SOCKET_NAME_CHARS <= MAX_SOCKET_PATH:
        # of multiprocessing's sockets: the next start removes what a killed one leaves
        tempfile.tempdir = str(plan.folder.path)
    try:
        return asyncio.run(_run(plan, entry))
    except KeyboardInterrupt:
        notify("stopped")
        return 130
    finally:
        # multiprocessing's own folder lies in it, which it removes at -100
        Finalize(None, plan.folder.close, exitpriority=-200)


async def _run(plan: Plan, entry: str) -> int:
    interactive = plan.up.chat or plan.up.prompt is not None
    names = ["coordinator", *(worker.name for worker in plan.workers), "up"]
    stream: TextIO = sys.stdout
    if interactive:
        stream = open(plan.run_dir / "log", "a", encoding="utf-8", opener=private)  # noqa: SIM115
    log = json_log(stream) if plan.coordinator.log_format == "json" else prefixed_log(stream, names)
    forks = WorkerForks(entry, lambda text: log("up", f"{time.strftime('%H:%M:%S')} WARNING {text}"))
    supervisor = Supervisor(
        commands(plan, forks.start),
        is_ready=lambda: is_ready(plan.url, *plan.asked_for_ready),
        log=log,
        grace_s=plan.coordinator.shutdown_timeout_s + plan.up.grace_s,
        ready_timeout_s=plan.up.ready_timeout_s,
        known_workers=partial(known_workers, plan),
        leave_within_s=max(worker.drain_timeout_s for worker in plan.workers) + plan.up.grace_s,
        hung_after_s=plan.up.hung_after_s,
    )

    def interrupt() -> None:
        supervisor.stop()
        if supervisor.stops == 1:
            grace_s = plan.coordinator.shutdown_timeout_s
            notify(f"stopping; open streams have {grace_s:g} s to end. Ctrl-C again ends them now.")

    def roll() -> None:
        forks.renew()
        supervisor.roll()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.stop)
    if not interactive:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGUSR1, roll)
    loop.add_signal_handler(signal.SIGUSR2, supervisor.signal_all, signal.SIGUSR2)  # debug on, off
    deliver_signals()
    notify(plan.summary)
    if sharing := shared(plan.workers):
        notify(sharing)
    status = await supervisor.run(_work(plan))
    forks.close()
    if supervisor.failure:
        if interactive and supervisor.failed:
            sys.stderr.writelines(f"  {line}\n" for line in list(supervisor.failed.last_lines)[:-1])
        notify(f"stopped: {supervisor.failure}")
    elif not interactive:
        notify("stopped")
    return status


def _work(plan: Plan) -> Callable[[], Awaitable[int]]:
    """What happens once the system serves."""
    settings = ChatSettings(url=plan.url, api_key_file=plan.up.api_key_file)

    async def serve() -> int:
        dashboard = dashboard_hint(plan, link=sys.stderr.isatty())
        notify(f"ready at {plan.url}\n{dashboard}\n\n{curl_example(plan)}\n\nCtrl-C stops everything.")
        await asyncio.Event().wait()
        return 0

    async def answer() -> int:
        from .terminal.chat import answer_once

        return await answer_once(settings, plan.up.prompt or "", plan.coordinator.tls_cert)

    async def chat() -> int:
        from .terminal.chat import converse

        notify(
            f"ready at {plan.url} (OpenAI-compatible); logs in "
            f"{plan.run_dir / 'log'}\n{dashboard_hint(plan, link=sys.stderr.isatty())}"
        )
        return await converse(settings, plan.coordinator.tls_cert)

    return chat if plan.up.chat else answer if plan.up.prompt is not None else serve


def commands(plan: Plan, fork: Start | None = None) -> list[Command]:
    """One command a process; each reads its settings from a file of its own in the run directory. ``fork``
    starts the workers.

    In the order of a roll: both roles of a model advance together, as a build may fit no older one."""
    kinds = [(worker.coordinator, getattr(worker, "start_as", worker.role)) for worker in plan.workers]
    counts = [kinds.count(kind) for kind in kinds]
    turns = [((kinds[:i].count(kind) + 1) / counts[i], counts[i], i) for i, kind in enumerate(kinds)]
    return [
        _command(plan.run_dir, "coordinator", "coordinator", plan.coordinator, threads=1),
        *(
            _command(plan.run_dir, w.role, w.name, w, 1 if w.threads == "auto" else w.threads, fork)
            for w in (plan.workers[i] for *_, i in sorted(turns))
        ),
    ]


def _command(
    run_dir: Path, role: str, name: str, settings: BaseModel, threads: int, fork: Start | None = None
) -> Command:
    path = run_dir / f"{name}.yaml"
    values = settings.model_dump(mode="json", exclude_none=True)
    env = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
    env |= {variable_of(name): values.pop(name) for name in SECRETS & set(values)}
    try:
        write_private(path, yaml.safe_dump({role: values}))
    except OSError as error:
        raise ConfigError(
            f"--run-dir: cannot write {path} ({error.strerror or error}); free some space there, "
            "or name another"
        ) from error
    env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    arguments = [role, "--config", str(path)]
    # a fuller host is better than no worker
    again = ["--kv-cache-shrink"] if isinstance(settings, WorkerSettings) else []
    if fork is not None:
        return Command(name, arguments, env, fork, again)
    return Command(name, [sys.executable, "-m", "splitserve.cli.main", *arguments], env, start_anew, again)


class LogLines:
    """Lines of a log on a disk that may be full: that costs lines, and no process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._num_lost = stream, 0

    def write(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
            if self._num_lost:
                num_lost, self._num_lost = self._num_lost, 0
                print(
                    f"about {num_lost} lines before this one are lost: there was no space",
                    file=self._stream,
                    flush=True,
                )
        except OSError as error:
            if not is_full(error):
                raise
            self._num_lost += 1


def prefixed_log(stream: TextIO, names: list[str]) -> Log:
    """Lines with their process's name before them, in colour on a terminal."""
    width, lines = max(map(len, names)), LogLines(stream)
    colour = stream.isatty() and not os.environ.get("NO_COLOR")
    prefixes = {
        name: f"\x1b[{COLOURS[i % len(COLOURS)]}m{name:<{width}}\x1b[0m |" if colour else f"{name:<{width}} |"
        for i, name in enumerate(names)
    }

    def log(name: str, line: str) -> None:
        lines.write(f"{prefixes[name]} {line}")

    return log


def json_log(stream: TextIO) -> Log:
    """Lines that are JSON as they are, others as a message in JSON."""

    lines = LogLines(stream)

    def log(name: str, line: str) -> None:
        lines.write(line if line.startswith("{") else json_line(name, line))

    return log


def dashboard_hint(plan: Plan, *, link: bool) -> str:
    """``link``: with one that opens a session, once; not for logs, which others may read."""
    key_file = plan.coordinator.admin_key_file
    if not link:
        return f"dashboard: {plan.url}/ (asks for the admin key in {key_file})"
    token = Operators(plan.admin_key).token()
    return (
        f"dashboard: {plan.url}{LOGIN}?token={token}\n(this link works once, within an hour; "
        f"{plan.url}/ asks for the key in {key_file})"
    )


def curl_example(plan: Plan) -> str:
    key = "" if plan.coordinator.tenants_file is None else '-H "Authorization: Bearer $KEY" '
    return (
        f"curl {plan.url}/v1/chat/completions {key}-H 'content-type: application/json' \\\n"
        f'  -d \'{{"model": "{plan.coordinator.model_name}", "messages": '
        '[{"role": "user", "content": "What does os.path.join do?"}]}\''
    )


def notify(text: str) -> None:
    """A message of our own, apart from the processes' logs."""
    LogLines(sys.stderr).write(text)
