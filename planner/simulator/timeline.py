"""What the cluster looked like over time: samples whose number stays bounded, for plots and the HTML view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

MOST = 600
"""Samples; beyond it every second one is dropped, and sampling goes on half as often."""


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """``used`` and ``cached``: shares of the KV cache; ``busy``: share of the time since the last sample in
    which a step ran."""

    running: int
    waiting: int
    used: float
    cached: float
    busy: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment. ``workers``: in the order of ``Timeline.names``."""

    at_s: float
    queued: int
    open: int
    arrived: int
    ended: int
    workers: tuple[WorkerSample, ...]


class Timeline:
    """``interval_s`` grows with the simulated time."""

    def __init__(self, names: Sequence[str], interval_s: float) -> None:
        self.names = list(names)
        self.interval_s = interval_s
        self.samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        if len(self.samples) > MOST:
            self.samples = self.samples[1::2]
            self.interval_s *= 2


PAGE = Path(__file__).with_name("view.html")


def write_view(path: Path, timeline: Timeline) -> None:
    """Write the page to scrub through a simulation: every worker's KV cache and queue at any time. One file,
    no network."""
    content = orjson.dumps(
        {"names": timeline.names, "samples": timeline.samples}, option=orjson.OPT_SERIALIZE_DATACLASS
    )
    text = content.decode().replace("</", "<\\/")  # no end tag inside the script
    path.write_text(PAGE.read_text(encoding="utf-8").replace("__DATA__", text), encoding="utf-8")
