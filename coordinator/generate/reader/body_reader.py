"""Has large bodies read by processes of their own, so that no client's request holds up another one's
tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import ApiError, Overloaded, Unavailable
from ...http.limits import HttpLimits
from ...lifecycle.adapters import AdapterNames
from ...text.model_route import ModelRoute
from ...text.served_model import ServedModels

if TYPE_CHECKING:  # it imports Prometheus' client, which the reader's process starts without
    from ...http.overload import Overload

MOST_PROCESSES = 4
ANSWER_TIMEOUT_S = 120.0
"""A process that sends no byte for this time is ended. The slowest known bodies take 2 s."""
_log = logging.getLogger(__name__)


class Present(NamedTuple):
    """What changes while the processes run; it goes with each body."""

    of_workers: Sequence[tuple[int, AdapterNames]]
    """By model: tokens that every worker holds; the adapters they have."""
    routes: Mapping[str, ModelRoute]
    refusals: Sequence[ApiError | None]
    """By model: the error that new requests get; empty where there are no routes."""


class BodyReader:
    """Starts its processes when they are first needed; each is some 100 MB. Methods are the loop's."""

    def __init__(self, models: ServedModels, limits: HttpLimits, overload: Overload) -> None:
        self._models, self._limits, self._overload = models, limits, overload
        self._pickled = b""
        num_processes = min(MOST_PROCESSES, max(1, (os.cpu_count() or 1) // 2))
        # each waits for one process
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="body-reader")
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._closed = False

    def warm_up(self) -> None:
        """Starts a process already, so that the first large body need not wait for it."""
        self._threads.submit(lambda: self._idle.append(self._start()))

    async def read(self, work: str, body: bytes | bytearray, *arguments: Any) -> Any:
        """What ``Work`` in ``reader_process.py`` makes of it. Raises ApiError: its, or Overloaded or
        Unavailable."""
        if not self._overload.take("tokenizer_bytes", len(body)):
            raise Overloaded("Too many large requests are being read; try again soon.", retry_after_s=1)
        try:
            future = self._threads.submit(self._ask, work, (self._present(), *arguments), body)
            answer = await asyncio.wrap_future(future)
        finally:
            self._overload.give_back("tokenizer_bytes", len(body))
        if not isinstance(answer, ApiError):
            return answer
        try:
            raise answer
        finally:
            # else the error, by its traceback, would hold both until the collector finds them
            del answer, body

    def refuses(self, model: str) -> bool:
        """Whether the model of this name can take nothing now."""
        return self._models.refusal(self._models.of(model)) is not None

    def _present(self) -> Present:
        models = self._models
        refusals = [models.refusal(model) for model in models.all] if models.routes else []
        return Present([(m.workers_hold(), m.adapters()) for m in models.all], models.routes, refusals)

    def close(self) -> None:
        """Ends the processes, in the middle of a body too."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._all):
            process.end()

    def _ask(self, work: str, arguments: tuple[Any, ...], body: bytes | bytearray) -> Any:
        """On a thread. An ApiError is returned."""
        process = self._idle.pop() if self._idle else self._start()
        try:
            answer = process.ask(work, arguments, body)
        except (OSError, EOFError) as error:
            self._all.discard(process)
            process.end()
            _log.error(
                (
                    "the process that reads large requests has ended or does not answer (%s): the next "
                    "request starts another"
                ),
                error,
            )
            raise Unavailable(
                "The process that reads large requests has ended; try again.", retry_after_s=1
            ) from error
        self._idle.append(process)
        return answer

    def _start(self) -> _Process:
        if not self._pickled:  # without what workers have, which changes: that is sent with each body
            models = [replace(model, workers_hold=int, adapters=AdapterNames) for model in self._models.all]
            self._pickled = pickle.dumps((models, self._limits))
        process = _Process(self._pickled)
        self._all.add(process)
        if self._closed:
            process.end()
        return process


class _Process:
    """One process; used by one thread at a time."""

    def __init__(self, models: bytes) -> None:
        self._connection, other = socket.socketpair()
        with other:
            command = [
                sys.executable,
                "-c",
                f"from {__package__}.reader_process import main; main({other.fileno()})",
            ]
            self._process = subprocess.Popen(command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL)
        self._connection.settimeout(ANSWER_TIMEOUT_S)
        self._unsent: bytes | None = models

    def ask(self, work: str, arguments: tuple[Any, ...], body: bytes | bytearray) -> Any:
        """Raises OSError or EOFError where it does not answer."""
        if self._unsent is not None:
            send(self._connection, self._unsent)
            self._unsent = None
        send(self._connection, pickle.dumps((work, arguments)), body)
        return pickle.loads(receive(self._connection)[0])

    def end(self) -> None:
        """At once."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer
        self._connection.close()
        self._process.kill()
        self._process.wait()


FRAME = struct.Struct("<QQ")


def send(connection: socket.socket, head: bytes, body: bytes | bytearray = b"") -> None:
    connection.sendall(FRAME.pack(len(head), len(body)) + head)
    if body:
        connection.sendall(body)


def receive(connection: socket.socket) -> tuple[bytearray, bytearray]:
    """The pickle and the bytes of a frame. Raises EOFError where the other end has closed."""
    num_head, num_body = FRAME.unpack(_exactly(connection, FRAME.size))
    return _exactly(connection, num_head), _exactly(connection, num_body)


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        if not (got := connection.recv_into(view[at:])):
            raise EOFError
        at += got
    return data
