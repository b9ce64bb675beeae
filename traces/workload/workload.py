"""A workload: what a synthetic trace is drawn from. The same workload and seed give the same trace.

It can be kept as JSON (``splitserve trace fit`` writes one, ``splitserve trace make --workload`` reads it).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from ..console import writing
from ..errors import WorkloadError
from ..operators import cut
from ..request import Trace, TraceRequest
from .arrivals import Arrivals, draw_arrivals
from .lengths import Lengths, draw_pairs
from .sessions import Sessions, draw_sessions


class Workload(BaseModel):
    """Without ``sessions`` every request stands alone and has no block hashes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["splitserve-workload"] = "splitserve-workload"
    version: Literal[1] = 1
    arrivals: Arrivals
    lengths: Lengths
    sessions: Sessions | None = None

    def at_rate(self, rate: float) -> Workload:
        """The same load at another mean rate, in requests per second, all turns counted; the profile's steps
        keep their length."""
        turns = self.sessions.turns if self.sessions else 1.0
        return self.model_copy(update={"arrivals": self.arrivals.model_copy(update={"rate": rate / turns})})

    def trace(
        self,
        seed: int,
        *,
        max_requests: int | None = None,
        duration_s: float = float("inf"),
        name: str = "workload",
    ) -> Trace:
        """A trace that ends at the first of ``max_requests`` and ``duration_s``; without both it has no
        end."""
        endless = Trace(name, lambda: self._draw(seed), self.sessions.block_size if self.sessions else None)
        return cut(endless, end_s=duration_s, max_requests=max_requests)

    def _draw(self, seed: int) -> Iterator[TraceRequest]:
        # each part has its own stream of chance: other lengths leave the arrivals as they were
        of_arrivals, of_lengths, of_sessions = (
            np.random.default_rng(one) for one in np.random.SeedSequence(seed).spawn(3)
        )
        starts = draw_arrivals(self.arrivals, of_arrivals)
        pairs = draw_pairs(self.lengths, of_lengths)
        if self.sessions:
            return draw_sessions(self.sessions, starts, pairs, of_sessions)
        return (TraceRequest(arrival, *pair) for arrival, pair in zip(starts, pairs, strict=False))


def read_workload(path: Path) -> Workload:
    """Raises WorkloadError."""
    try:
        return Workload.model_validate_json(path.read_bytes())
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise WorkloadError(f"{path}: {place or 'content'}: {first['msg']}") from None


def write_workload(path: Path, workload: Workload) -> None:
    """As JSON. Raises WorkloadError."""
    with writing(path, WorkloadError):
        path.write_text(workload.model_dump_json(indent=1, exclude_none=True) + "\n", encoding="utf-8")
