"""A second process that computes steps of one role in a loop, with the same model, on command."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from ...engine.latency_profile import StepRole
from ...engine.load_model import load_model
from ...engine.settings import WorkerSettings
from ..errors import ProfilingError
from .design import Bounds, Experiment
from .measure import batch_of

READY_S = 600.0
"""It reads the weights, and may compile kernels."""
ANSWERED_S = 120.0
"""It answers between two steps."""
ENDED_S = 10.0


class NeighbourProcess:
    """Context manager of the process, which ends with the block or with this process: its pipe closes."""

    def __init__(self, settings: WorkerSettings, bounds: Bounds, experiments: Sequence[Experiment]) -> None:
        self._start = (settings, bounds, list(experiments))

    def __enter__(self) -> Self:
        """Raises ProfilingError."""
        context = get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *self._start), daemon=True)
        self._process.start()
        theirs.close()
        self._await_answer(READY_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()
        self._process.join(ENDED_S)
        self._process.kill()
        self._process.join()

    def compute(self, role: StepRole | None) -> None:
        """Make it compute steps of this role from now on; None: it rests. Raises ProfilingError."""
        self._line.send(role)
        self._await_answer(ANSWERED_S)

    def _await_answer(self, within_s: float) -> None:
        try:
            if self._line.poll(within_s):
                self._line.recv()
                return
        except (EOFError, OSError):
            raise ProfilingError(
                "the neighbour's process has ended: is there memory for two workers?"
            ) from None
        raise ProfilingError(f"the neighbour's process did not answer within {within_s:g} s")


def _serve(
    line: Connection, settings: WorkerSettings, bounds: Bounds, experiments: Sequence[Experiment]
) -> None:
    """Until the line is cut."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the other process, which then cuts the line
    runner = load_model(
        settings, max_decode_seqs=bounds.max_num_seqs, prefill_tokens=lambda _: bounds.max_batch_tokens
    ).runner
    with suppress(EOFError, OSError):
        line.send(None)
        while True:
            role: StepRole | None = line.recv()
            steps = cycle([batch_of(e, bounds.block_size) for e in experiments if e.role == role])
            if role is not None:
                runner.execute(next(steps))  # it computes before it reports
            line.send(None)
            while role is not None and not line.poll():
                runner.execute(next(steps))
