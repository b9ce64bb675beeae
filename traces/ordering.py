"""Requests of a file in order of arrival, though its rows may stand a bounded time too late."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from .errors import TraceFileError
from .request import TraceRequest

Numbered = Iterator[tuple[int, TraceRequest]]  # with the line where each stands


@dataclass(frozen=True, slots=True)
class Order:
    """What holds for the rows of all formats. Times in seconds."""

    path: Path
    origin_s: float  # of the arrivals as the rows give them
    disorder_s: float
    drop_empty: bool

    def applied(self, rows: Numbered) -> Iterator[TraceRequest]:
        """The requests in order of arrival, which starts at the origin. Raises TraceError."""
        checked = self._checked(rows)
        return (
            request for _, request in (self._sorted(checked) if self.disorder_s else self._in_order(checked))
        )

    def _checked(self, rows: Numbered) -> Numbered:
        for line, request in rows:
            if not request.num_prompt_tokens or not request.num_output_tokens:
                if self.drop_empty:
                    continue
                what = "prompt" if not request.num_prompt_tokens else "output"
                raise TraceFileError(
                    self.path,
                    f"a request of 0 {what} tokens; to leave such rows out: --drop-empty",
                    line=line,
                )
            if self.origin_s:  # dates have microseconds, which a float of Unix time just holds
                request = replace(request, arrival_s=round(request.arrival_s - self.origin_s, 6))
            yield line, request

    def _in_order(self, rows: Numbered) -> Numbered:
        last_s = 0.0
        for line, request in rows:
            if request.arrival_s < last_s:
                self._refuse(line, last_s - request.arrival_s)
            last_s = request.arrival_s
            yield line, request

    def _sorted(self, rows: Numbered) -> Numbered:
        waiting: list[tuple[float, int, TraceRequest]] = []  # lines make ties keep the file's order
        newest_s = 0.0
        for line, request in rows:
            if request.arrival_s < newest_s - self.disorder_s:
                self._refuse(line, newest_s - request.arrival_s)
            heapq.heappush(waiting, (request.arrival_s, line, request))
            newest_s = max(newest_s, request.arrival_s)
            while waiting[0][0] < newest_s - self.disorder_s:
                _, first, earliest = heapq.heappop(waiting)
                yield first, earliest
        while waiting:
            _, first, earliest = heapq.heappop(waiting)
            yield first, earliest

    def _refuse(self, line: int, late_s: float) -> NoReturn:
        message = (
            f"arrives {late_s:.6g} s before a row above it; to have rows sorted that stand up to S "
            "seconds too late: --disorder-s S"
        )
        raise TraceFileError(self.path, message, line=line)
