"""Several coordinator processes on one host: one HTTP port, and nothing shared but the workers.

The kernel deals connections out (SO_REUSEPORT). Each process has its own control port, to which every worker
connects (the processes name each other in their welcome), its own queue, and its own view of the workers by
what these report. The parent serves nothing: it starts the processes, and starts again what dies.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .errors import CannotStart
from .http.listening_server import bind
from .settings import CoordinatorSettings, ModelSettings

RESTART_S, RESTART_MAX_S = 0.5, 30.0  # doubling, while a process dies again and again
SETTLED_S = 60.0
GRACE_S = 10.0  # to end, after the time that open requests get
CANNOT_START = 78
"""Exit status (EX_CONFIG) of a process that its settings do not let serve: another try would end the same."""
_log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=ModelSettings)


class Place(NamedTuple):
    """One of several: which, of how many, and where it announces itself."""

    number: int = 0
    num: int = 1
    run_folder: Path | None = None

    def siblings(self, control_address: str) -> tuple[str, ...]:
        """Return where the others listen to workers; ``control_address``: where this one does."""
        others = (other for other in range(self.num) if other != self.number)
        return tuple(address_of(control_address, other - self.number) for other in others)


Serve = Callable[[Any, Place], None]
"""Runs one of several processes; takes its settings."""


def settings_of(settings: CoordinatorSettings, index: int) -> CoordinatorSettings:
    """Return the settings of process ``index``: its own ports, except the HTTP server's."""
    admin_port = settings.admin_port + index if settings.admin_port else settings.admin_port
    return _moved(settings, index).model_copy(
        update={
            "admin_port": admin_port,
            "other_models": tuple(_moved(other, index) for other in settings.other_models),
        }
    )


def _moved(model: Model, index: int) -> Model:
    return model.model_copy(update={"control_address": address_of(model.control_address, index)})


def address_of(control_address: str, index: int) -> str:
    """Return the address at which process ``index`` listens to workers."""
    host, _, port = control_address.rpartition(":")
    return f"{host}:{int(port) + index}"


def run_all(settings: CoordinatorSettings, serve: Serve, run_folder: Path | None = None) -> None:
    """Runs ``settings.processes`` processes until a signal. Raises OSError where the port is not to be had,
    CannotStart where a process cannot serve with these settings."""
    # not listening: it gets no connection, and keeps the port ours
    reserved = bind(settings.listen_host, settings.port, shared=True)
    settings = settings.model_copy(update={"port": reserved.getsockname()[1]})
    processes = [
        CoordinatorProcess(settings, index, serve, run_folder) for index in range(settings.processes)
    ]
    stopping: list[int] = []

    def pass_on(number: int, _: object) -> None:
        for process in processes:
            process.signal(number)

    def stop(number: int, _: object) -> None:
        if stopping:
            pass_on(signal.SIGUSR1, None)
        stopping.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    signal.signal(signal.SIGUSR2, pass_on)  # debug on, off: the processes do the logging
    try:
        while not stopping:
            now = time.monotonic()
            for process in processes:
                process.keep_running(now)
            wait([process.sentinel for process in processes if process.sentinel is not None], timeout=0.2)
    finally:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + settings.shutdown_timeout_s + GRACE_S
        for process in processes:
            process.join(deadline)
        reserved.close()


class CoordinatorProcess:
    """One process, whenever it lives."""

    def __init__(
        self, settings: CoordinatorSettings, index: int, serve: Serve, run_folder: Path | None = None
    ) -> None:
        place = Place(index, settings.processes, run_folder)
        self._arguments = (settings_of(settings, index), place)
        self._index, self._serve = index, serve
        self._process: SpawnProcess | None = None
        self._started = self._not_before = float("-inf")
        self._delay_s = RESTART_S
        self._num_starts = 0

    @property
    def sentinel(self) -> int | None:
        """Readable once it has ended; None while there is none."""
        return self._process.sentinel if self._process is not None else None

    @property
    def exitcode(self) -> int | None:
        """-N: killed by signal N; None while it runs or there is none."""
        return self._process.exitcode if self._process is not None else None

    def keep_running(self, now: float) -> None:
        """Starts it, or starts it again after a while. Raises CannotStart where its first start has shown
        that it never will."""
        if self._process is not None and self._process.is_alive():
            return
        if self._process is not None:
            if self._process.exitcode == CANNOT_START and self._num_starts == 1:
                raise CannotStart(
                    f"coordinator process {self._index} cannot start; what it said above tells why"
                )
            self._delay_s = (
                RESTART_S if now - self._started > SETTLED_S else min(2 * self._delay_s, RESTART_MAX_S)
            )
            _log.error(
                "coordinator process %d has ended (%s): again in %g s",
                self._index,
                self._process.exitcode,
                self._delay_s,
            )
            self._process, self._not_before = None, now + self._delay_s
        if now >= self._not_before:
            self._process = multiprocessing.get_context("spawn").Process(
                target=self._serve, args=self._arguments, daemon=False
            )
            # It inherits the mask: a SIGUSR2 before it has its handler waits until then, and does not kill
            # it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
            self._process.start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
            self._started, self._num_starts = now, self._num_starts + 1

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def join(self, deadline: float) -> None:
        """Kills it where it takes longer."""
        if self._process is not None:
            self._process.join(max(0.0, deadline - time.monotonic()))
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
