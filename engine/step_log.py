"""A worker's steps as they were: what was in each, and how long it took. To hold a profile, and a simulation,
against what really ran.

A file of comma-separated values for each process, a line for each step. Times are seconds of the host's
monotonic clock. Of a step that is launched on a GPU while the one before it runs, the time begins when that
one ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from .errors import EngineError
from .latency_profile import StepRole
from .step.batch import Batch, StepOutput
from .step.step_thread import Launch, OnLayer, Runner
from .step_clock import parts_of
from .worker_model import WorkerModel


class StepLogError(EngineError):
    """A step log cannot be written."""


class LoggedStep(NamedTuple):
    """One row of the log.

    ``chunks``: "cached+new" of each prompt chunk, separated by spaces; ``num_seqs`` sequences generate, with
    ``num_context_tokens`` in all."""

    began: float
    seconds: float
    chunks: str
    num_seqs: int
    num_context_tokens: int

    @property
    def role(self) -> StepRole:
        """Role of the step: prefill if it has prompt chunks."""
        return "prefill" if self.chunks else "decode"


class StepLog:
    """The file of this process."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        """Raises StepLogError."""
        path = folder / f"{worker_id.replace('/', '_')}-{os.getpid()}.csv"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # closed with the process
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise StepLogError(
                f"cannot write the step log {path}: {error.strerror}; choose another --step-log folder"
            ) from None
        self._lock = Lock()
        self._ended = float("-inf")
        self._write(",".join(LoggedStep._fields))

    def note(self, batch: Batch, began: float) -> None:
        """A step is over that began, or was launched, then."""
        now = time.monotonic()
        chunks, num_seqs, num_context_tokens = parts_of(batch)
        chunk_text = " ".join(f"{cached}+{new}" for cached, new in chunks)
        with self._lock:
            began, self._ended = max(began, self._ended), now
            self._write(f"{began:.6f},{now - began:.6f},{chunk_text},{num_seqs},{num_context_tokens}")

    def _write(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())


class _LoggedRunner:
    """See ``Runner`` and ``Launch``."""

    def __init__(self, runner: Runner, launch: Launch | None, log: StepLog) -> None:
        self._runner, self._launch, self._log = runner, launch, log

    def execute(self, batch: Batch, on_layer: OnLayer | None = None) -> StepOutput:
        began = time.monotonic()
        output = self._runner.execute(batch, on_layer)
        self._log.note(batch, began)
        return output

    def launch(self, batch: Batch, on_layer: OnLayer | None = None) -> Callable[[], StepOutput]:
        assert self._launch is not None, "this model is not launched"
        began = time.monotonic()
        wait = self._launch(batch, on_layer)

        def output() -> StepOutput:
            result = wait()
            self._log.note(batch, began)
            return result

        return output


def logged(model: WorkerModel, folder: Path, worker_id: str) -> WorkerModel:
    """The model, whose steps are written to a file of this folder from now on. Raises StepLogError."""
    runner = _LoggedRunner(model.runner, model.launch, StepLog(folder, worker_id))
    return replace(model, runner=runner, launch=runner.launch if model.launch is not None else None)
