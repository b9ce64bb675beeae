"""One simulated request, from arrival to end, and the CSV file of all of them."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ...coordinator.lifecycle.request import Ended
from ...coordinator.lifecycle.time_ledger import Stages
from ...traces.console import writing
from ..errors import SimulationError

COLUMNS = (
    "number", "arrival_s", "num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "outcome",
    "ttft_s", "tpot_s", "e2e_s", "queue_s", "prefill_s", "handoff_s", "decode_s", "coordinator_s",
    "prefill_worker", "decode_worker", "num_dispatches",
)  # fmt: skip


@dataclass(slots=True)
class RequestRecord:
    """``*_at``: seconds of the virtual clock."""

    number: int
    arrival_s: float  # in the trace
    arrived_at: float
    num_prompt_tokens: int
    num_asked_tokens: int
    num_received: int = 0
    first_at: float = 0.0
    ended_at: float = 0.0
    num_cached_tokens: int = 0
    num_dispatches: int = 0
    outcome: str = ""  # finished, or the kind of error
    prefill_worker: str = ""
    decode_worker: str = ""
    stages: Stages | None = None

    def close(self, ended: Ended, now: float) -> None:
        """The one terminal event."""
        self.ended_at, self.outcome = now, ended.error or "finished"
        self.num_received = ended.num_output_tokens
        self.num_cached_tokens, self.num_dispatches = ended.num_cached_tokens, ended.num_dispatches
        self.prefill_worker, self.decode_worker = ended.prefill_worker, ended.decode_worker
        self.stages = ended.stages

    @property
    def finished(self) -> bool:
        return self.outcome == "finished"

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrived_at

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None where there is no other. A request ends with its
        last token."""
        return (self.ended_at - self.first_at) / (self.num_received - 1) if self.num_received > 1 else None

    @property
    def tpot_all_s(self) -> float:
        """Seconds after the first token over all output tokens, as splitwise-sim's TBT."""
        return (self.ended_at - self.first_at) / max(1, self.num_received)

    @property
    def e2e_s(self) -> float:
        return self.ended_at - self.arrived_at

    def row(self) -> tuple[object, ...]:
        """As ``COLUMNS`` names it."""
        stages = self.stages or Stages()
        times = (stages.queue, stages.prefill, stages.handoff, stages.decode, stages.coordinator)
        known = (self.ttft_s, self.tpot_s) if self.finished else (None, None)
        return (
            self.number,
            self.arrival_s,
            self.num_prompt_tokens,
            self.num_received,
            self.num_cached_tokens,
            self.outcome,
            *known,
            self.e2e_s,
            *times,
            self.prefill_worker,
            self.decode_worker,
            self.num_dispatches,
        )


@contextmanager
def record_file(path: Path | None) -> Iterator[Callable[[RequestRecord], None] | None]:
    """What a simulation calls for each record; gzip'ed if the name ends in .gz. Nothing where ``path`` is
    None. Raises SimulationError."""
    if path is None:
        yield None
        return
    with writing(path, SimulationError), _opened(path) as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        yield lambda record: writer.writerow([_shown(value) for value in record.row()])


def _shown(value: object) -> object:
    return f"{value:.9g}" if isinstance(value, float) else value


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "wt", newline="", encoding="utf-8")
    return path.open("w", newline="", encoding="utf-8")
