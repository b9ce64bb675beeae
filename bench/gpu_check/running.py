"""Runs the parts, each in a process of its own with its own time limit, and keeps what they report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .line import MACHINE_FILE, Line, as_json, read_lines
from .plan import SECONDS, Part, Stages
from .summary import Outcome, State, summary

MARK = "GPU_CHECK_PART"
"""Variable in the environment of a part's processes, by which all of them are found when it is over."""
POLL_S, WRITE_EACH_S = 0.05, 5.0
LEAST_SHARE = 0.5  # of its limit that a part must have to begin
LOG_LINES = 12  # of a part that failed


@dataclass
class Running:
    part: Part
    process: subprocess.Popen[bytes]
    began: float
    until: float


@dataclass
class Run:
    """``out`` receives results.json, summary.txt and logs.tar.gz, each replaced whole after every part."""

    stages: Stages
    out: Path
    work: Path
    device: str
    seconds: float
    environment: Mapping[str, object] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)  # of every part's environment
    at_once: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))  # parts of a stage

    def __post_init__(self) -> None:
        self.outcomes = {part.name: Outcome(part, State.WAITING) for stage in self.stages for part in stage}
        self._running: list[Running] = []
        self._began, self._written = time.monotonic(), 0.0
        self._id = f"{os.getpid()}-{time.time_ns()}"
        for folder in (self.out, self.work / "logs", self.work / "lines"):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def left_s(self) -> float:
        return self._began + self.seconds - time.monotonic()

    def run(self) -> bool:
        """True if nothing is wrong."""
        try:
            for stage in self.stages:
                self._run_stage(stage)
        finally:
            self._end_processes()
            for each in self._running:
                each.process.wait()
            for outcome in self.outcomes.values():
                if outcome.state is State.RUNNING:
                    outcome.lines = read_lines(self._lines(outcome.part))
                    outcome.state, outcome.why = State.FAILED, "the run was ended meanwhile"
                elif outcome.state is State.WAITING:
                    outcome.state = State.NOT_RUN
            self.write()
        return not any(outcome.is_wrong for outcome in self.outcomes.values())

    def _run_stage(self, stage: tuple[Part, ...]) -> None:
        waiting = list(stage)
        threads = max(1, len(os.sched_getaffinity(0)) // len(stage))
        while waiting or self._running:
            while waiting and len(self._running) < self.at_once:
                part = waiting.pop(0)
                if self._fits(part):
                    self._running.append(self._start(part, threads))
            for each in list(self._running):
                if each.process.poll() is not None or time.monotonic() > each.until:
                    self._over(each)
                    self._running.remove(each)
            if time.monotonic() - self._written > WRITE_EACH_S:
                self.write()
            time.sleep(POLL_S)

    def _fits(self, part: Part) -> bool:
        return self.left_s >= self._limit(part) * LEAST_SHARE

    def _limit(self, part: Part) -> float:
        return part.limit_s * max(1.0, self.seconds / SECONDS)

    def _start(self, part: Part, threads: int) -> Running:
        limit, now = min(self._limit(part), self.left_s), time.monotonic()
        command = [
            sys.executable,
            "-m",
            f"{__package__}.part",
            part.run,
            str(self._lines(part)),
            str(self.work),
            self.device,
            f"{now + limit:.1f}",
            *part.arguments,
        ]
        variables = {
            **os.environ,
            **self.variables,
            MARK: f"{self._id} {part.name}",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(threads),
        }
        with self._log(part).open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=variables
            )
        self.outcomes[part.name].state = State.RUNNING
        return Running(part, process, now, now + limit)

    def _over(self, running: Running) -> None:
        part, outcome = running.part, self.outcomes[running.part.name]
        status = running.process.poll()
        self._end_processes(part)
        running.process.wait()
        outcome.seconds = time.monotonic() - running.began
        outcome.lines = read_lines(self._lines(part))
        if status is None:
            outcome.why = f"did not end within {running.until - running.began:.0f} s and was killed"
        elif status < 0:
            outcome.why = f"ended by {signal.Signals(-status).name}"
        elif status > 0:
            outcome.why = f"ended with status {status}"
        outcome.state = State.FAILED if outcome.why else State.OVER
        if outcome.why:
            outcome.log = self._log(part).read_text(errors="replace").splitlines()[-LOG_LINES:]
        self.write()
        print(outcome.one_line(), flush=True)

    def _end_processes(self, part: Part | None = None) -> None:
        """Kills what is left of a part, or of all: also what has another parent by now."""
        mark = f"{self._id} {part.name if part else ''}"
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                found = process.environ().get(MARK, "")
                if found == mark or (part is None and found.startswith(mark)):
                    process.kill()

    def write(self) -> None:
        """Replace the three files with the present results."""
        self._written = time.monotonic()
        for outcome in self.outcomes.values():
            if outcome.state is State.RUNNING:
                outcome.lines = read_lines(self._lines(outcome.part))
        took, environment = self._written - self._began, self._environment()
        found = {
            "environment": environment,
            "seconds": round(took, 1),
            "of_seconds": self.seconds,
            "parts": {name: self._as_json(outcome) for name, outcome in self.outcomes.items()},
        }
        _replace(self.out / "results.json", json.dumps(found, indent=1) + "\n")
        _replace(
            self.out / "summary.txt", summary(list(self.outcomes.values()), environment, took, self.seconds)
        )
        archive = self.out / "logs.tar.gz.part"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(self.work / "logs", "logs")
        archive.replace(self.out / "logs.tar.gz")

    def _as_json(self, outcome: Outcome) -> dict[str, object]:
        lines: list[Line] = outcome.lines
        return {
            "state": outcome.state.value,
            "seconds": round(outcome.seconds, 1),
            "limit_s": round(self._limit(outcome.part), 1),
            **({"why": outcome.why, "log": outcome.log} if outcome.why else {}),
            "lines": as_json(lines),
        }

    def _environment(self) -> dict[str, object]:
        """With what the part "machine" found."""
        file = self.work / MACHINE_FILE
        return dict(self.environment) | (json.loads(file.read_text()) if file.exists() else {})

    def _lines(self, part: Part) -> Path:
        return self.work / "lines" / f"{part.name}.jsonl"

    def _log(self, part: Part) -> Path:
        return self.work / "logs" / f"{part.name}.log"


def _replace(file: Path, text: str) -> None:
    new = file.with_name(f"{file.name}.part")
    new.write_text(text)
    new.replace(file)
