"""A prefill and a decode worker around a model that takes no time: their real loops, threads and sockets; the
coordinator is the test's."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self
from unittest.mock import patch

import numpy as np

from splitserve.bench.null_workers import null_model
from splitserve.engine.errors import EngineError
from splitserve.engine.step.step_thread import Runner
from splitserve.transport.channels import channels
from splitserve.transport.channels.channels import RouterChannel
from splitserve.transport.messages.messages import (
    FROM_WORKER,
    Hello,
    Message,
    Peer,
    Prefill,
    RequestSpec,
    SamplingParams,
    Welcome,
    u32,
)
from splitserve.transport.movers.shm import SharedPool
from splitserve.worker.live_parts import live_parts
from splitserve.worker.loop import Worker
from splitserve.worker.main import serve
from splitserve.worker.settings import DecodeSettings, PrefillSettings

DEADLINE_S = 60.0
PATIENT = {"orphaned_after_s": 3600}  # this coordinator answers no heartbeats
NUM_BLOCKS, MAX_MODEL_LEN = 2000, 4000
COORDINATOR = 1


def spec(dispatch: int, request: int | None = None, epoch: int = 0, max_tokens: int = 2000) -> RequestSpec:
    """A prompt of two blocks. ``request``: its number, where it is another than the dispatch's."""
    number = dispatch if request is None else request
    return RequestSpec(
        request_id=f"r{number}",
        epoch=epoch,
        dispatch=dispatch,
        coordinator=COORDINATOR,
        token_ids=u32([number + 1] * 32),
        num_prompt_tokens=32,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        deadline_s=60.0,
    )


@contextmanager
def process_settings_kept() -> Iterator[None]:
    """A worker's loop sets them for its whole process, which here is everybody's."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        gc.unfreeze()


class WorkerPair:
    """Entered, both workers run and are welcome. ``received``: all their messages since then,
    without the hellos."""

    def __init__(self, mover: str = "tcp", runners: dict[str, Runner] | None = None, **settings: Any) -> None:
        """``runners``: by role, in place of the one that takes no time."""
        self._stack = ExitStack()
        self._stack.enter_context(
            patch.object(channels, "HEARTBEAT_TIMEOUT_MS", 60_000)
        )  # nobody is given up for a machine's pause
        self._channel = self._stack.enter_context(RouterChannel.bind("tcp://127.0.0.1:*", None, FROM_WORKER))
        common = {
            "model": ".",
            "coordinator": self._channel.address,
            "insecure": True,
            "mover": mover,
            **PATIENT,
            **settings,
        }
        models = {role: null_model(NUM_BLOCKS, MAX_MODEL_LEN) for role in ("prefill", "decode")}
        models |= {role: replace(models[role], runner=runner) for role, runner in (runners or {}).items()}
        shared = SharedPool.create(models["decode"].pool.nbytes)
        self._stack.callback(shared.close)
        pool = np.frombuffer(shared.buffer, np.uint8)[: models["decode"].pool.nbytes].reshape(
            models["decode"].pool.shape
        )
        models["decode"] = replace(models["decode"], pool=pool)
        prefill = PrefillSettings.model_validate({**common, "name": "p"})
        decode = DecodeSettings.model_validate({**common, "name": "d"})
        self.prefill = Worker(prefill, live_parts(prefill, models["prefill"]))
        self.decode = Worker(decode, live_parts(decode, models["decode"], shared=shared))
        self.threads: dict[str, threading.Thread] = {}
        self.errors: dict[str, EngineError] = {}
        """By role, what ended a worker's loop."""
        self.received: list[Message] = []
        self._hellos: dict[str, tuple[bytes, Hello]] = {}

    def __enter__(self) -> Self:
        self._stack.enter_context(process_settings_kept())
        for role, worker in (("prefill", self.prefill), ("decode", self.decode)):
            self.threads[role] = threading.Thread(
                target=self._run, args=(role, worker), name=role, daemon=True
            )
            self.threads[role].start()
        self.until(lambda: len(self._hellos) == 2)
        return self

    def __exit__(self, *_: object) -> None:
        for role, worker in (("prefill", self.prefill), ("decode", self.decode)):
            if role not in self.errors:
                worker.stop()
            self.threads[role].join(DEADLINE_S)
        self._stack.close()

    def _run(self, role: str, worker: Worker) -> None:
        try:
            serve(worker)
        except EngineError as error:
            self.errors[role] = error

    def ask(self, *specs: RequestSpec) -> None:
        """Sends these prompts to the prefill worker."""
        hello = self._hellos["decode"][1]
        peer = Peer(worker_id=hello.worker_id, incarnation=hello.incarnation, address=hello.peer_address)
        self._channel.send(self._hellos["prefill"][0], *(Prefill(spec=one, decode=peer) for one in specs))

    def until(self, condition: Callable[[], object]) -> None:
        """Listens until it is so."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, [
                message for message in self.received if type(message).__name__ not in ("Load", "StepTokens")
            ]
            self._channel.socket.poll(50)
            for identity, message in self._channel.receive(256):
                if isinstance(message, Hello):
                    self._hellos[message.role] = identity, message
                    self._channel.send(identity, Welcome(coordinator=COORDINATOR, heartbeat_s=0.25))
                else:
                    self.received.append(message)
