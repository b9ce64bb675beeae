"""The written record of a campaign, which grows from run to run: what ran (pieces: which seeds, at which
commit), and the summed counts and findings."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from simulation.campaign import Report


@dataclass
class Piece:
    """Worlds of seeds ``first_seed`` to ``last_seed``, run by one process at one commit."""

    commit: str
    date: str
    scenario: str
    first_seed: int
    last_seed: int
    requests: int = 0
    processor_s: float = 0.0
    failures: int = 0


@dataclass
class Record:
    """All pieces, and their sum."""

    environment: dict[str, object] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    sum: Report = field(default_factory=Report)

    @classmethod
    def read(cls, path: Path) -> Record:
        """What was written there; an empty record where nothing was."""
        if not path.exists():
            return cls()
        written = json.loads(path.read_text())
        report = Report(
            num_requests=written["requests"],
            num_worlds=written["worlds"],
            num_events=written["events"],
            processor_s=written["processor_s"],
            longest_rest_s=written["longest_rest_s"],
            counts=Counter(written["counts"]),
            messages=Counter(written["messages"]),
            failures=written["failures"],
        )
        return cls(written["environment"], [Piece(**piece) for piece in written["pieces"]], report)

    def add(self, piece: Piece, report: Report) -> None:
        """One more run, of a piece that is here already or a new one."""
        if piece not in self.pieces:
            self.pieces.append(piece)
        piece.last_seed += report.num_worlds
        piece.requests += report.num_requests
        piece.processor_s = round(piece.processor_s + report.processor_s, 1)
        piece.failures += len(report.failures)
        self.sum.merge(report)

    def merge(self, other: Record) -> None:
        """Adds another record's pieces. Raises ValueError where a piece is in both."""
        known = {(piece.scenario, piece.first_seed) for piece in self.pieces}
        if known & {(piece.scenario, piece.first_seed) for piece in other.pieces}:
            raise ValueError("a piece is in both records")
        self.environment = self.environment or other.environment
        self.pieces += other.pieces
        self.sum.merge(other.sum)

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        result = {
            "environment": self.environment,
            **self.sum.summary(),
            "pieces": [asdict(piece) for piece in self.pieces],
        }
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(result, indent=1) + "\n")
        unfinished.replace(path)
